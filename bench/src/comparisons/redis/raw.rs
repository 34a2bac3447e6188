//! An upper bound for a connection: commands are encoded in advance, and replies are compared and not decoded.

use bytes::BytesMut;
use tidewire_bench::{Meter, Metric, Sample};
use tidewire_redis::Value;
use tidewire_redis::resp::{Version, encode_command};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::data::{KEYS, LARGE, LARGE_VALUE, LIST, PIPELINE_COMMANDS, VALUES};
use super::load::{Command, Load};
use super::peer::EXPECT_REPLY;
use super::server::Server;

pub(super) fn round(server: &Server, load: Load, meter: Meter) -> Sample {
    let (port, cpu) = (server.port(), server.cpu());
    load.run(move |runtime| {
        let mut connection = Some(runtime.block_on(Connection::open(port, load)));
        let mut exchange = |times: u64| {
            runtime.block_on(async {
                let mut moved = connection.take().expect("the connection is put back after each call");
                // Spawned, like the tasks of the other clients, because the thread that blocks on the runtime is not one of its workers.
                let exchanged = tokio::spawn(async move {
                    for _ in 0..times {
                        moved.exchange().await;
                    }
                    moved
                });
                connection = Some(exchanged.await.expect(EXPECT_REPLY));
            });
        };
        exchange(load.requests_per_task.div_ceil(20));
        let before = cpu.now();
        let sample = meter.measure(load.operations(), || exchange(load.requests_per_task));
        sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
    })
}

struct Connection {
    stream: TcpStream,
    request: BytesMut,
    expected: BytesMut,
    input: Vec<u8>,
}

impl Connection {
    async fn open(port: u16, load: Load) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("redis-server accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        let (mut request, mut expected) = (BytesMut::new(), BytesMut::new());
        for number in 0..load.tasks {
            append(load.command, number, &mut request, &mut expected);
        }
        let input = vec![0; expected.len()];
        Self { stream, request, expected, input }
    }

    async fn exchange(&mut self) {
        self.stream.write_all(&self.request).await.expect(EXPECT_REPLY);
        self.stream.read_exact(&mut self.input).await.expect(EXPECT_REPLY);
        assert!(self.input == self.expected, "the replies match the requests");
    }
}

/// Appends the request of a task and the reply to it.
fn append(command: Command, number: usize, request: &mut BytesMut, expected: &mut BytesMut) {
    let bulk = |text: &'static str| Value::from(text);
    let all = |count: usize| Value::Array(VALUES[..count].iter().map(|value| bulk(value)).collect());
    let reply = match command {
        Command::Get => {
            encode_command(&["GET", &KEYS[number]], request);
            bulk(&VALUES[number])
        }
        Command::Set => {
            encode_command(&["SET", &KEYS[number], &VALUES[number]], request);
            Value::Simple("OK".into())
        }
        Command::Pipeline => {
            for number in 0..PIPELINE_COMMANDS {
                append(Command::Get, number, request, expected);
            }
            return;
        }
        Command::ListRange => {
            encode_command(&["LRANGE", LIST, "0", "-1"], request);
            all(VALUES.len())
        }
        Command::MultiGet => {
            let words: Vec<_> = ["MGET"].into_iter().chain(KEYS.iter().map(String::as_str)).collect();
            encode_command(&words, request);
            all(VALUES.len())
        }
        Command::GetLarge => {
            encode_command(&["GET", LARGE], request);
            bulk(&LARGE_VALUE)
        }
    };
    reply.encode(Version::Resp2, expected).expect("the value can be encoded");
}
