//! Write operations: results, and rejected parameters.

use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Session, StaticToken, StaticTokens, TokenValidator, Validation};
use tidewire_store::Store;

use crate::client::{Client, RpcClient as _, options, serve_store};
use crate::tides_server::{
    FOUR_TIDES, NOW, expect_error, expect_error_details, expect_invalid_params, insert_tides, serve_tides,
    serve_tides_locally, serve_tides_with, store_options, tide, tides_config,
};

fn version(tide: Json, version: u64) -> Json {
    let mut tide = tide;
    tide["_version"] = json!(version);
    tide
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_returns_the_stored_record() {
    let (_server, mut client) = serve_tides_locally().await;
    let insert = |data: Json| json!({"bucket": "tides", "data": data});
    let first = client.call("store.insert", insert(json!({"port": "Hook", "level": 3}))).await;
    assert_eq!(first, tide(1, "Hook", 3));
    // Fields outside the schema are stored. Values for the store's own fields are ignored.
    let data =
        json!({"port": "Hook", "level": 3, "depth": {"m": [1, null]}, "_version": 9, "_createdAt": 1, "_updatedAt": 1});
    let mut expected = tide(2, "Hook", 3);
    expected["depth"] = json!({"m": [1, null]});
    assert_eq!(client.call("store.insert", insert(data)).await, expected);
    // A key in the request is used, and generated keys continue after it.
    let given = client.call("store.insert", insert(json!({"id": 7, "port": "Hook", "level": 3}))).await;
    assert_eq!(given, tide(7, "Hook", 3));
    let next = client.call("store.insert", insert(json!({"port": "Hook", "level": 3}))).await;
    assert_eq!(next, tide(8, "Hook", 3));
    // An existing key is overwritten, and keeps its insertion order.
    let over = client.call("store.insert", insert(json!({"id": 1, "port": "Brest", "level": null}))).await;
    assert_eq!(over, tide(1, "Brest", Json::Null));
    let all = client.call("store.all", json!({"bucket": "tides"})).await;
    assert_eq!(all[0], over);
    assert_eq!(all.as_array().unwrap().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_violate_the_schema_are_rejected() {
    let (_server, mut client) = serve_tides_locally().await;
    let insert = |data: Json| json!({"bucket": "tides", "data": data});
    let issues = json!([
        {"field": "port", "message": "is required", "code": "required"},
        {"field": "level", "message": "must be a number", "code": "type"},
    ]);
    let (code, error) = client.call_err("store.insert", insert(json!({"level": "high"}))).await;
    assert_eq!(code, "VALIDATION_ERROR");
    let found = error["details"].as_array().unwrap();
    for (found, expected) in found.iter().zip(issues.as_array().unwrap()) {
        assert_eq!((&found["field"], &found["code"]), (&expected["field"], &expected["code"]));
        assert!(found["message"].is_string() && found.as_object().unwrap().len() == 3, "{found}");
    }
    assert_eq!(found.len(), 2);
    assert!(
        error["message"].as_str().unwrap().starts_with("Validation failed for bucket \"tides\": port: "),
        "{error}"
    );
    insert_tides(&mut client, &[("Hook", 1)]).await;
    // The merged record is validated, so a required field cannot become null. The failed insert has consumed key 1.
    let update = json!({"bucket": "tides", "key": 2, "data": {"port": null}});
    let (code, error) = client.call_err("store.update", update).await;
    assert_eq!((code.as_str(), &error["details"][0]["code"]), ("VALIDATION_ERROR", &json!("required")));
    let kept = client.call("store.get", json!({"bucket": "tides", "key": 2})).await;
    assert_eq!(kept, tide(2, "Hook", 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn update_merges_into_the_record() {
    let (_server, mut client) = serve_tides_locally().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let update = |key: Json, data: Json| json!({"bucket": "tides", "key": key, "data": data});
    let updated = client.call("store.update", update(json!(1), json!({"level": 4}))).await;
    assert_eq!(updated, version(tide(1, "Hook", 4), 2));
    // The key, generated fields and the store's own fields are unchanged. Null is a value.
    let data = json!({"id": 99, "level": null, "_version": 50, "_createdAt": 1, "_updatedAt": 1});
    let updated = client.call("store.update", update(json!(1), data)).await;
    assert_eq!(updated, version(tide(1, "Hook", Json::Null), 3));
    let updated = client.call("store.update", update(json!(1), json!({}))).await;
    assert_eq!(updated, version(tide(1, "Hook", Json::Null), 4));
    let message = expect_error(&mut client, "store.update", update(json!(99), json!({})), "NOT_FOUND").await;
    assert_eq!(message, "record 99 not found in bucket \"tides\"");
    expect_error(&mut client, "store.update", update(json!("1"), json!({})), "NOT_FOUND").await;
    expect_error(&mut client, "store.update", update(json!({"a": 1}), json!({})), "NOT_FOUND").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_and_clear_remove_records() {
    let (_server, mut client) = serve_tides_locally().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let delete = |key: Json| json!({"bucket": "tides", "key": key});
    for key in [json!(1), json!(1), json!("none"), json!([])] {
        assert_eq!(
            client.call("store.delete", delete(key)).await,
            json!({"deleted": true}),
            "whether or not the record exists"
        );
    }
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 3);
    for _ in 0..2 {
        assert_eq!(client.call("store.clear", json!({"bucket": "tides"})).await, json!({"cleared": true}));
        assert_eq!(client.call("store.all", json!({"bucket": "tides"})).await, json!([]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unique_values_are_enforced_until_released() {
    let (_server, mut client) = serve_tides_locally().await;
    let insert = |code: &str| json!({"bucket": "tides", "data": {"port": "Hook", "code": code}});
    client.call("store.insert", insert("a")).await;
    client.call("store.insert", insert("b")).await;
    let details = json!({"bucket": "tides", "field": "code", "value": "a"});
    expect_error_details(&mut client, "store.insert", insert("a"), "ALREADY_EXISTS", details.clone()).await;
    let update = |key: u64, code: Json| json!({"bucket": "tides", "key": key, "data": {"code": code}});
    expect_error_details(&mut client, "store.update", update(2, json!("a")), "ALREADY_EXISTS", details.clone()).await;
    let over = json!({"bucket": "tides", "data": {"id": 2, "port": "Hook", "code": "a"}});
    expect_error_details(&mut client, "store.insert", over.clone(), "ALREADY_EXISTS", details.clone()).await;
    expect_error_details(&mut client, "store.upsert", over, "ALREADY_EXISTS", details.clone()).await;
    let many = json!({"bucket": "tides", "data": [{"port": "Hook", "code": "new"}, {"port": "Hook", "code": "a"}]});
    expect_error_details(&mut client, "store.insertMany", many, "ALREADY_EXISTS", details).await;
    // A record may keep its own value, and null is not unique.
    client.call("store.update", update(1, json!("a"))).await;
    client.call("store.update", update(2, Json::Null)).await;
    client.call("store.insert", insert("b")).await;
    client.call("store.delete", json!({"bucket": "tides", "key": 1})).await;
    client.call("store.insert", insert("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upsert_inserts_or_merges() {
    let (_server, mut client) = serve_tides_locally().await;
    let upsert = |data: Json| json!({"bucket": "tides", "data": data});
    let new = client.call("store.upsert", upsert(json!({"id": 5, "port": "Hook", "level": 1}))).await;
    assert_eq!(new, tide(5, "Hook", 1));
    let merged = client.call("store.upsert", upsert(json!({"id": 5, "level": 2}))).await;
    assert_eq!(merged, version(tide(5, "Hook", 2), 2));
    let (code, error) = client.call_err("store.upsert", upsert(json!({"id": 6, "level": 2}))).await;
    assert_eq!((code.as_str(), &error["details"][0]["field"]), ("VALIDATION_ERROR", &json!("port")));
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_many_inserts_all_or_none() {
    let (_server, mut client) = serve_tides_locally().await;
    let many = |data: Json| json!({"bucket": "tides", "data": data});
    let done = client
        .call("store.insertMany", many(json!([{"port": "Hook", "level": 1}, {"port": "Brest", "level": 2}])))
        .await;
    assert_eq!(done, json!({"records": [tide(1, "Hook", 1), tide(2, "Brest", 2)]}));
    assert_eq!(client.call("store.insertMany", many(json!([]))).await, json!({"records": []}));
    let (code, error) = client.call_err("store.insertMany", many(json!([{"port": "Hook"}, {"level": 2}]))).await;
    assert_eq!(code, "VALIDATION_ERROR", "{error}");
    assert_eq!(error["details"][0]["code"], "required", "{error}");
    let message =
        expect_error(&mut client, "store.insertMany", many(json!([{"port": "Hook"}, 7])), "VALIDATION_ERROR").await;
    assert!(message.contains("\"data[1]\" must be an object"), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn full_bucket_evicts_its_oldest_record() {
    let (_server, mut client) = serve_tides_locally().await;
    let mut config = tides_config();
    config["maxSize"] = json!(2);
    client.call("store.defineBucket", json!({"name": "two", "config": config})).await;
    for _ in 0..3 {
        client.call("store.insert", json!({"bucket": "two", "data": {"port": "Hook", "level": 1}})).await;
    }
    let all = client.call("store.all", json!({"bucket": "two"})).await;
    assert_eq!(all, json!([tide(2, "Hook", 1), tide(3, "Hook", 1)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_version_is_rejected() {
    let (_server, mut client) = serve_tides_locally().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let update =
        |key: u64, version: Json| json!({"bucket": "tides", "key": key, "data": {"level": 9}, "version": version});
    let updated = client.call("store.update", update(1, json!(1))).await;
    assert_eq!(updated, version(tide(1, "Hook", 9), 2));
    let details = json!({"bucket": "tides", "key": 1, "version": 2});
    expect_error_details(&mut client, "store.update", update(1, json!(1)), "CONFLICT", details.clone()).await;
    let delete = |key: u64, version: Json| json!({"bucket": "tides", "key": key, "version": version});
    expect_error_details(&mut client, "store.delete", delete(1, json!(1)), "CONFLICT", details).await;
    expect_error(&mut client, "store.update", update(99, json!(1)), "NOT_FOUND").await;
    // Null or no version means any version.
    client.call("store.update", update(1, Json::Null)).await;
    assert_eq!(client.call("store.delete", delete(1, json!(3))).await, json!({"deleted": true}));
    // A delete of a missing record succeeds, with any version.
    assert_eq!(client.call("store.delete", delete(1, json!(3))).await, json!({"deleted": true}));
    let wrong: &[(&str, &[Json], &str)] = &[("version", &[json!("1"), json!(-1), json!(1.5), json!({})], "an integer")];
    expect_invalid_params(&mut client, "store.update", update(2, json!(1)), wrong).await;
    expect_invalid_params(&mut client, "store.delete", delete(2, json!(1)), wrong).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_writes_are_checked() {
    let (_server, mut client) = serve_tides_locally().await;
    let no_text = [Json::Null, json!(""), json!(7), json!(["tides"]), json!({})];
    let no_object = [Json::Null, json!([]), json!("x"), json!(7)];
    let no_array = [Json::Null, json!({}), json!("x"), json!(7)];
    let text = "a non-empty string";
    let key: (&str, &[Json], &str) = ("key", &[Json::Null], "a value other than null");
    let data: (&str, &[Json], &str) = ("data", &no_object, "an object");
    let once: (&str, &[Json], &str) = ("idempotencyKey", &[json!(""), json!(7), json!({})], text);
    for (operation, good, wrong) in [
        ("store.insert", json!({"data": {"port": "Hook"}}), vec![data, once]),
        ("store.upsert", json!({"data": {"id": 1, "port": "Hook"}}), vec![data, once]),
        ("store.insertMany", json!({"data": [{"port": "Hook"}]}), vec![("data", &no_array[..], "an array"), once]),
        ("store.update", json!({"key": 1, "data": {}}), vec![key, data, once]),
        ("store.delete", json!({"key": 1}), vec![key, once]),
        ("store.clear", json!({}), vec![once]),
    ] {
        let mut good = good;
        good["bucket"] = json!("tides");
        client.call(operation, good.clone()).await;
        let wrong: Vec<_> = wrong.into_iter().chain([("bucket", &no_text[..], text)]).collect();
        expect_invalid_params(&mut client, operation, good.clone(), &wrong).await;
        good["bucket"] = json!("none");
        let message = expect_error(&mut client, operation, good, "BUCKET_NOT_DEFINED").await;
        assert_eq!(message, "bucket \"none\" is not defined");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_are_members_of_the_request_itself() {
    let (_server, mut client) = serve_tides_locally().await;
    for envelope in ["params", "payload", "data"] {
        let mut request = json!({});
        request[envelope] = json!({"bucket": "tides", "key": 1});
        let message = expect_error(&mut client, "store.get", request, "VALIDATION_ERROR").await;
        assert_eq!(message, "\"bucket\" is missing; expected a non-empty string");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_above_the_size_or_depth_limit_are_validation_errors() {
    let (_server, mut client) = serve_tides().await;
    let port = "x".repeat(300_000);
    let long = client.call("store.insert", json!({"bucket": "tides", "data": {"port": port}})).await;
    assert_eq!(long["port"], json!(port));
    let almost = json!({"bucket": "tides", "data": {"port": "x".repeat((1 << 20) - 68)}});
    expect_error(&mut client, "store.insert", almost, "VALIDATION_ERROR").await;
    let deep = (0..90).fold(json!(1), |inner, _| json!([inner]));
    expect_error(
        &mut client,
        "store.insert",
        json!({"bucket": "tides", "data": {"port": "Hook", "deep": deep}}),
        "VALIDATION_ERROR",
    )
    .await;
    let deeper = format!(
        r#"{{"id":77,"type":"store.insert","bucket":"tides","data":{{"port":"Hook","deep":{}1{}}}}}"#,
        "[".repeat(500),
        "]".repeat(500)
    );
    client.send_text(deeper).await;
    let reply = client.reply(77).await;
    assert_eq!(reply["code"], "VALIDATION_ERROR", "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_idempotency_key_writes_once() {
    let (server, mut client) = serve_tides().await;
    let insert =
        |key: &str, port: &str| json!({"bucket": "tides", "data": {"port": port, "level": 1}, "idempotencyKey": key});
    let first = client.call("store.insert", insert("k", "Hook")).await;
    assert_eq!(first, tide(1, "Hook", 1));
    assert_eq!(client.call("store.insert", insert("k", "Hook")).await, first);
    client.call("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 5}})).await;
    assert_eq!(
        client.call("store.insert", insert("k", "Hook")).await,
        first,
        "the first reply, even after later changes"
    );
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 1);
    expect_error(&mut client, "store.insert", insert("k", "Brest"), "CONFLICT").await;
    expect_error(&mut client, "store.upsert", insert("k", "Hook"), "CONFLICT").await;
    expect_error(&mut client, "store.clear", json!({"bucket": "tides", "idempotencyKey": "k"}), "CONFLICT").await;
    // A failed write has no effect, and its key is not stored.
    let update = json!({"bucket": "tides", "key": 2, "data": {"level": 8}, "idempotencyKey": "u"});
    expect_error(&mut client, "store.update", update.clone(), "NOT_FOUND").await;
    client.call("store.insert", insert("l", "Hook")).await;
    let updated = client.call("store.update", update.clone()).await;
    assert_eq!(updated, version(tide(2, "Hook", 8), 2));
    assert_eq!(client.call("store.update", update).await, updated);
    for (operation, params) in [
        ("store.delete", json!({"bucket": "tides", "key": 2})),
        ("store.insertMany", json!({"bucket": "tides", "data": [{"port": "Hook"}]})),
        ("store.upsert", json!({"bucket": "tides", "data": {"id": 50, "port": "Hook"}})),
        ("store.transaction", json!({"operations": [{"op": "insert", "bucket": "tides", "data": {"port": "Hook"}}]})),
        ("store.defineBucket", json!({"name": "more", "config": tides_config()})),
        ("store.updateBucket", json!({"name": "more", "updates": {"ttl": 1000}})),
        ("store.defineQuery", json!({"name": "all", "config": {"bucket": "more"}})),
        ("store.undefineQuery", json!({"name": "all"})),
        ("store.dropBucket", json!({"name": "more"})),
        ("store.clear", json!({"bucket": "tides"})),
    ] {
        let mut params = params;
        params["idempotencyKey"] = json!(operation);
        let first = client.call(operation, params.clone()).await;
        let count = client.call("store.count", json!({"bucket": "tides"})).await;
        assert_eq!(client.call(operation, params).await, first, "{operation}");
        assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, count, "{operation}");
    }
    // Anonymous clients of the same address share their keys.
    let mut other = Client::connect(&server).await;
    assert_eq!(other.call("store.insert", insert("k", "Hook")).await, first);
}

/// Regression: anonymous clients got the replies to writes of other addresses.
#[tokio::test(flavor = "multi_thread")]
async fn idempotency_keys_of_anonymous_clients_are_per_address() {
    let (server, mut client) = serve_tides().await;
    let insert = |port: &str| json!({"bucket": "tides", "data": {"port": port, "level": 1}, "idempotencyKey": "k"});
    let first = client.call("store.insert", insert("Hook")).await;
    let mut other = Client::connect_from([127, 0, 0, 2].into(), &server).await;
    // The key of another address is neither a repetition nor a conflict.
    assert_eq!(other.call("store.insert", insert("Brest")).await, tide(2, "Brest", 1));
    assert_eq!(other.call("store.insert", insert("Brest")).await, tide(2, "Brest", 1));
    // In-process clients have their own keys.
    let local = server.client(None);
    assert_eq!(local.request::<Json>("store.insert", insert("Cork")).await.unwrap(), tide(3, "Cork", 1));
    assert_eq!(client.call("store.insert", insert("Hook")).await, first);
}

/// A user id that looks like an address must not share the keys of that address.
#[tokio::test(flavor = "multi_thread")]
async fn user_ids_do_not_collide_with_addresses() {
    let names = ["", "127.0.0.1", "\0address 127.0.0.1", "\0\0address 127.0.0.1", "\0program"];
    let (server, mut anonymous) = serve_tides_with(options().auth(Auth::new(PrefixTokens).required(false))).await;
    let insert = json!({"bucket": "tides", "data": {"port": "Hook", "level": 1}, "idempotencyKey": "k"});
    assert_eq!(anonymous.call("store.insert", insert.clone()).await, tide(1, "Hook", 1));
    assert_eq!(server.client(None).request::<Json>("store.insert", insert.clone()).await.unwrap(), tide(2, "Hook", 1));
    for (number, name) in (3..).zip(names) {
        let mut client = Client::connect(&server).await;
        client.call("auth.login", json!({"token": format!("t{name}")})).await;
        assert_eq!(client.call("store.insert", insert.clone()).await, tide(number, "Hook", 1), "{name:?}");
    }
}

/// Accepts every token, which is `t` followed by the user id.
struct PrefixTokens;

impl TokenValidator for PrefixTokens {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move { Ok(Some(Session::new(&token[1..], ["writer"]))) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_idempotency_key_writes_once_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let insert = json!({"bucket": "tides", "data": {"port": "Hook", "level": 1}, "idempotencyKey": "k"});
    let mut first = None;
    for _ in 0..2 {
        let (store, _) = Store::open(dir.path(), store_options()).unwrap();
        let server = serve_store(store.clone(), options()).await;
        let mut client = Client::connect(&server).await;
        if first.is_none() {
            client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
        }
        let reply = client.call("store.insert", insert.clone()).await;
        assert_eq!(&reply, first.get_or_insert(reply.clone()));
        assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 1);
        drop(client);
        server.stop(Duration::ZERO).await;
        store.close().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_keys_are_per_user() {
    let tokens = [("a", "ada"), ("b", "bo")].map(|(token, user)| (token, StaticToken::new(user, ["writer"])));
    let auth = Auth::new(StaticTokens::new(tokens).unwrap()).required(false);
    let (server, mut anonymous) = serve_tides_with(options().auth(auth)).await;
    let insert = json!({"bucket": "tides", "data": {"port": "Hook", "level": 1}, "idempotencyKey": "k"});
    let mut ada = Client::connect(&server).await;
    ada.call("auth.login", json!({"token": "a"})).await;
    let mut bo = Client::connect(&server).await;
    bo.call("auth.login", json!({"token": "b"})).await;
    assert_eq!(ada.call("store.insert", insert.clone()).await, tide(1, "Hook", 1));
    assert_eq!(bo.call("store.insert", insert.clone()).await, tide(2, "Hook", 1));
    assert_eq!(anonymous.call("store.insert", insert.clone()).await, tide(3, "Hook", 1));
    // Another connection of the same user shares its keys.
    let mut again = Client::connect(&server).await;
    again.call("auth.login", json!({"token": "a"})).await;
    assert_eq!(again.call("store.insert", insert).await, tide(1, "Hook", 1));
    assert_eq!(anonymous.call("store.count", json!({"bucket": "tides"})).await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_records_are_not_read() {
    let (_server, mut client) = serve_tides_locally().await;
    let mut config = tides_config();
    config["ttl"] = json!("2s");
    client.call("store.defineBucket", json!({"name": "brief", "config": config})).await;
    let insert = |data: Json| json!({"bucket": "brief", "data": data});
    let brief = client.call("store.insert", insert(json!({"port": "Hook"}))).await;
    assert_eq!(brief["_expiresAt"], NOW + 2000);
    let given = client.call("store.insert", insert(json!({"port": "Hook", "_expiresAt": NOW + 7}))).await;
    assert_eq!(given["_expiresAt"], NOW + 7);
    // An expired record is not returned, even before it is swept.
    let late = client.call("store.insert", insert(json!({"port": "Hook", "_expiresAt": NOW - 1}))).await;
    assert_eq!(client.call("store.get", json!({"bucket": "brief", "key": late["id"]})).await, Json::Null);
    assert_eq!(client.call("store.count", json!({"bucket": "brief"})).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_insert_many_names_the_record() {
    let (_server, mut client) = serve_tides().await;
    let data = json!([{"port": "Hook"}, {"port": "Brest"}, {"port": 7}]);
    let details = json!([{"field": "port", "message": "must be a string", "code": "type"}]);
    let params = json!({"bucket": "tides", "data": data});
    let message = expect_error_details(&mut client, "store.insertMany", params, "VALIDATION_ERROR", details).await;
    assert!(message.starts_with("data[2]: "), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 0);
}
