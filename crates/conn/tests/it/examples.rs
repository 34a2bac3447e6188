#[path = "../../examples/chat.rs"]
mod chat;
#[path = "../../examples/echo.rs"]
mod echo;
#[path = "../../examples/heartbeat.rs"]
mod heartbeat;

#[test]
fn the_chat_runs() {
    chat::main();
}

#[test]
fn the_echo_runs() {
    echo::main();
}

#[test]
fn the_heartbeat_runs() {
    heartbeat::main();
}
