//! Structs written to a real server and read back, in both protocols.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use tidewire_redis::commands::{StreamId, XaddOptions, hgetall, hset, xadd, xrange, xread};
use tidewire_redis::{Client, Error, Fields, Script, Serde};

use crate::servers::{options, resp2_and_resp3};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Boat {
    name: String,
    crew: u8,
    kind: Kind,
    id: u64,
    distance: i128,
    width: f64,
    beam: f32,
    ready: bool,
    mark: char,
    flag: Vec<u8>,
    hull: Hull,
    port: Option<String>,
    berth: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Sloop,
    Ketch,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Hull(String);

fn tern() -> Boat {
    Boat {
        name: "Tern \"II\"\r\n".into(),
        crew: 3,
        kind: Kind::Ketch,
        id: u64::MAX,
        distance: i128::MIN,
        width: 0.1 + 0.2,
        beam: 3.3,
        ready: false,
        mark: 'ß',
        flag: vec![0, 255, b'\n'],
        hull: Hull(String::new()),
        port: None,
        berth: Some(7),
    }
}

#[tokio::test]
async fn structs_round_trip() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let tern = tern();
        assert_eq!(client.send(hset("boat", Fields::of(&tern).unwrap())).await.unwrap(), 12);
        let Serde(boat) = client.send(hgetall("boat").returning::<Serde<Boat>>()).await.unwrap();
        assert_eq!(boat, tern);

        // From a stream, whose entries are nested.
        let id = StreamId { milliseconds: 1, sequence: 0 };
        client.send(xadd("boats", Fields::of(&tern).unwrap(), XaddOptions::default().id(id))).await.unwrap();
        let all = xrange("boats", StreamId::ZERO, StreamId::MAX, None);
        let Serde(entries) = client.send(all.returning::<Serde<Vec<(String, Boat)>>>()).await.unwrap();
        assert_eq!(entries, [("1-0".to_owned(), tern)]);
        let streams = xread([("boats", StreamId::ZERO)], None);
        let Serde(streams) =
            client.send(streams.returning::<Serde<HashMap<String, Vec<(String, Boat)>>>>()).await.unwrap();
        assert_eq!(streams, HashMap::from([("boats".to_owned(), entries)]));
    }
}

#[tokio::test]
async fn all_forms_of_a_reply_deserialize_to_the_same_value() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct Harbour {
        name: String,
        depth: f64,
        berths: u64,
        ships: i128,
        open: bool,
        closed: bool,
        note: Vec<u8>,
        boats: Vec<Berth>,
        flags: BTreeSet<String>,
        tide: (i8, f32),
        pilot: Option<String>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Berth {
        length: u8,
    }

    // Each has its own type in RESP3, and is a string, an integer or a flat array in RESP2.
    let script = Script::new(
        "redis.setresp(3) return {map={name={verbatim_string={format='txt', string='Hull'}}, depth={double=7.5}, \
         berths={double=12}, ships={big_number='-170141183460469231731687303715884105728'}, open=true, closed=false, \
         note='\\0\\255', boats={{map={length=9}}, {map={length='10', more={1, 2}}}}, flags={set={red=true, green=true}}, \
         tide={-1, {double=0.25}}, unknown={map={}}}}",
    );
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let Serde(harbour) = client.invoke(&script.returning::<Serde<Harbour>>()).await.unwrap();
        let expected = Harbour {
            name: "Hull".into(),
            depth: 7.5,
            berths: 12,
            ships: i128::MIN,
            open: true,
            closed: false,
            note: vec![0, 255],
            boats: vec![Berth { length: 9 }, Berth { length: 10 }],
            flags: BTreeSet::from(["red".to_owned(), "green".to_owned()]),
            tide: (-1, 0.25),
            pilot: None,
        };
        assert_eq!(harbour, expected);
    }
}

#[tokio::test]
async fn deserialization_errors_have_a_path() {
    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Port {
        name: String,
        #[serde(default)]
        depth: u8,
    }

    fn path_and_text<T>(result: Result<T, Error>) -> (Option<String>, String) {
        match result.err() {
            Some(Error::Conversion(error)) => (error.path().map(str::to_owned), error.to_string()),
            other => panic!("{other:?}"),
        }
    }

    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let read = || client.send(hgetall("port").returning::<Serde<Port>>());

        // Without the key there are no fields, which only an `Option` accepts.
        let (path, text) = path_and_text(read().await);
        assert!(path.is_none() && text.contains("missing field `name`"), "{text}");
        let port = || client.send(hgetall("port").returning::<Serde<Option<Port>>>());
        assert_eq!(port().await.unwrap(), Serde(None));

        client.send(hset("port", [("name", "Hull")])).await.unwrap();
        let hull = || Port { name: "Hull".into(), depth: 0 };
        assert_eq!((read().await.unwrap(), port().await.unwrap()), (Serde(hull()), Serde(Some(hull()))));

        client.send(hset("port", [("depth", "deep")])).await.unwrap();
        let (path, text) = path_and_text(read().await);
        assert_eq!(path.as_deref(), Some("depth"));
        assert!(text.starts_with("expected an integer that fits u8, got bulk string \"deep\" at depth; "), "{text}");

        client.send(hset("port", [("depth", "9"), ("piers", "4")])).await.unwrap();
        let (_, text) = path_and_text(read().await);
        assert!(text.contains("unknown field `piers`, expected `name` or `depth`"), "{text}");

        for name in ["Hull", "Bath"] {
            let depth = if name == "Bath" { "300" } else { "3" };
            let request = xadd("ports", [("name", name), ("depth", depth)], XaddOptions::default());
            client.send(request).await.unwrap();
        }
        let ports = xrange("ports", StreamId::ZERO, StreamId::MAX, None).returning::<Serde<Vec<(String, Port)>>>();
        let (path, text) = path_and_text(client.send(ports).await);
        assert_eq!(path.as_deref(), Some("1.1.depth"), "{text}");

        let kinds = Script::new("return {'sloop', 'raft'}").returning::<Serde<Vec<Kind>>>();
        let (path, text) = path_and_text(client.invoke(&kinds).await);
        assert!(path.as_deref() == Some("1") && text.contains("unknown variant `raft`"), "{text}");
    }
}
