//! Options that set flags of the connections on the server.

use std::time::Duration;

use tidewire_redis::{Client, Command, ConnectionError, ErrorCode, Options, commands};
use tidewire_testkit::RedisServer;

use crate::servers::{Scripted, greeting, options};

async fn flags(client: &Client) -> String {
    let info: String = client.send(Command::new("CLIENT").arg("INFO").returning()).await.unwrap();
    info.split(" flags=").nth(1).unwrap().split(' ').next().unwrap().to_owned()
}

#[tokio::test]
async fn no_evict_sets_the_flag_of_all_connections() {
    let server = RedisServer::start();
    let client = Client::connect(options(server.port())).await.unwrap();
    assert!(!flags(&client).await.contains('e'));
    let url = format!("redis://127.0.0.1:{}?no_evict=true&name=kept", server.port());
    let client = Client::connect(Options::from_url(&url).unwrap()).await.unwrap();
    assert!(flags(&client).await.contains('e'));
    // An exclusive connection has it, too.
    client.send(commands::blpop(["none"], Duration::from_millis(1))).await.unwrap();
    let list = server.cli(["CLIENT", "LIST"]);
    let of_client: Vec<_> = list.lines().filter(|line| line.contains("name=kept ")).collect();
    assert!(of_client.len() == 2 && of_client.iter().all(|line| line.contains(" flags=e ")), "{list}");
}

#[tokio::test]
async fn no_touch_sets_the_flag_or_the_server_refuses_the_handshake() {
    let server = RedisServer::start();
    match Client::connect(options(server.port()).no_touch(true)).await {
        Ok(client) => assert!(flags(&client).await.contains('T')),
        // Before Redis 7.2.
        Err(ConnectionError::Refused(error)) => {
            assert_eq!(error.code, ErrorCode::Err, "{error}");
            assert!(server.cli(["CLIENT", "NO-TOUCH", "ON"]).starts_with("ERR"), "{error}");
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[tokio::test]
async fn server_that_refuses_a_flag_refuses_the_handshake() {
    for flag in ["NO-EVICT", "NO-TOUCH"] {
        let server = Scripted::answering(move |words, _| match words.get(1) {
            Some(word) if word == flag => format!("-ERR {} {}\r\n", words[1], words[2]),
            _ => greeting(words).unwrap_or_else(|| "+OK\r\n".to_owned()),
        })
        .await;
        let client = Client::connect(options(server.port()).no_evict(true).no_touch(true)).await;
        let Err(ConnectionError::Refused(error)) = client else { panic!("{client:?}") };
        assert_eq!(error.to_string(), format!("ERR {flag} ON"));
    }
}
