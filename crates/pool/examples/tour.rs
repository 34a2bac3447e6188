//! A small link shortener: a request becomes a query, and the query becomes a response. All three are messages with the same key.
//!
//! `cargo run -p tidewire-pool --example tour`

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tidewire_pool::{Context, Handler, Key, Message, Observed, Pool, Reply, SubmitError};

/// The payload of a message. The handler matches it exhaustively, so a new variant must be handled before the program compiles.
enum Payload {
    Request { path: String, body: String, reply: Option<Reply<Response>> },
    Query { operation: Operation, reply: Option<Reply<Response>> },
    Response { response: Response, reply: Option<Reply<Response>> },
}

enum Operation {
    Insert { url: String },
    Find { code: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Response {
    status: u16,
    text: String,
}

/// The business logic. It uses the pool only to submit follow-up messages.
#[derive(Default)]
struct Shortener {
    links: Mutex<HashMap<String, String>>,
}

impl Handler<Payload> for Shortener {
    type Error = SubmitError<Payload>;

    fn handle(&self, message: &mut Message<Payload>, context: &mut Context<'_, Payload>) -> Result<(), Self::Error> {
        let next = match &mut message.payload {
            Payload::Request { path, body, reply } => {
                let operation = match path.as_str() {
                    "/shorten" => Operation::Insert { url: std::mem::take(body) },
                    code => Operation::Find { code: code.trim_start_matches('/').to_owned() },
                };
                Payload::Query { operation, reply: reply.take() }
            }
            Payload::Query { operation, reply } => {
                Payload::Response { response: self.run(operation), reply: reply.take() }
            }
            Payload::Response { response, reply } => {
                if let Some(mut reply) = reply.take() {
                    // Fails if the caller has dropped its future, which is not an error.
                    let _ = reply.send(response.clone());
                }
                return Ok(());
            }
        };
        context.submit(Message::new(message.key, next))
    }
}

impl Shortener {
    fn run(&self, operation: &Operation) -> Response {
        let mut links = self.links.lock().expect("the lock is not poisoned");
        match operation {
            Operation::Insert { url } => {
                let code = format!("{:04x}", Key::of(url).0 & 0xffff);
                links.insert(code.clone(), url.clone());
                Response { status: 201, text: code }
            }
            Operation::Find { code } => match links.get(code) {
                Some(url) => Response { status: 302, text: url.clone() },
                None => Response { status: 404, text: format!("no link {code}") },
            },
        }
    }
}

pub(crate) fn main() {
    let pool = Pool::builder().workers(2).start(Observed::new(Shortener::default())).expect("the settings are valid");

    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    runtime.block_on(async {
        let created = request(&pool, "/shorten", "https://example.com/a/long/way").await;
        println!("POST /shorten -> {} {}", created.status, created.text);
        assert_eq!(created.status, 201);

        let found = request(&pool, &format!("/{}", created.text), "").await;
        println!("GET /{} -> {} {}", created.text, found.status, found.text);
        assert_eq!(found, Response { status: 302, text: "https://example.com/a/long/way".into() });

        let missing = request(&pool, "/none", "").await;
        println!("GET /none -> {} {}", missing.status, missing.text);
        assert_eq!(missing.status, 404);
    });

    let shutdown = pool.drain(Duration::from_secs(5));
    let stats = pool.stats();
    println!("{} messages handled, {} left", stats.handled, shutdown.returned.len());
    assert_eq!((stats.handled, shutdown.returned.len()), (9, 0));
}

/// Submits a request to the pool, with a key derived from its content, and awaits the response.
async fn request(pool: &Pool<Payload>, path: &str, body: &str) -> Response {
    let key = Key::of(&(path, body));
    let (path, body) = (path.to_owned(), body.to_owned());
    let response = pool.ask(|reply| Message::new(key, Payload::Request { path, body, reply: Some(reply) })).await;
    response.unwrap_or_else(|error| Response { status: 503, text: error.to_string() })
}
