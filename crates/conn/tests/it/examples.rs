#[path = "../../examples/chat.rs"]
mod chat;
#[path = "../../examples/echo.rs"]
mod echo;
#[path = "../../examples/heartbeat.rs"]
mod heartbeat;
#[path = "../../examples/websocket.rs"]
#[expect(dead_code, reason = "its main serves until the process ends")]
mod websocket;

#[test]
fn chat_example_runs() {
    chat::main();
}

#[test]
fn echo_example_runs() {
    echo::main();
}

#[test]
fn heartbeat_example_runs() {
    heartbeat::main();
}

#[tokio::test]
async fn websocket_example_echoes() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(websocket::serve(listener));
    crate::websocket::Client::connect(addr).await.ask("hello").await;
}

/// The example is shown in the README of the crate and in the manual.
#[test]
fn documentation_contains_the_websocket_example() {
    let example = include_str!("../../examples/websocket.rs").replace("pub(crate) ", "");
    let (_, code) = example.split_once("\n\n").unwrap();
    for page in ["README.md", "../../docs/conn.md"] {
        let text = std::fs::read_to_string(format!("{}/{page}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(text.contains(code), "{page} differs from examples/websocket.rs");
    }
}
