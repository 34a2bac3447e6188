#[path = "../../examples/chat.rs"]
mod chat;
#[path = "../../examples/heartbeat.rs"]
mod heartbeat;

#[test]
fn the_chat_runs() {
    chat::main();
}

#[test]
fn the_heartbeat_runs() {
    heartbeat::main();
}
