#[path = "../../examples/todo.rs"]
#[allow(dead_code, reason = "its main is not run here")]
mod todo;

#[test]
fn todo_list_persists_between_commands() {
    let dir = tempfile::tempdir().unwrap();
    let todo = |arguments: &[&str]| todo::run(dir.path(), arguments);
    assert_eq!(todo(&["list"]).unwrap(), "0 done\n");
    assert_eq!(todo(&["add", "buy milk"]).unwrap(), "1 buy milk\n");
    assert_eq!(todo(&["add", "sail"]).unwrap(), "2 sail\n");
    let twice = todo(&["add", "sail"]).unwrap_err();
    assert_eq!(twice.to_string(), "bucket \"todos\": a record with text = \"sail\" already exists");
    let empty = todo(&["add", ""]).unwrap_err();
    assert!(empty.to_string().starts_with("Validation failed for bucket \"todos\": text:"), "{empty}");
    assert_eq!(todo(&["done", "1"]).unwrap(), "done: buy milk\n");
    assert_eq!(todo(&["list"]).unwrap(), "2 sail\n1 done\n");
    assert_eq!(todo(&["tidy"]).unwrap(), "1 removed\n");
    assert_eq!(todo(&["list"]).unwrap(), "2 sail\n0 done\n");
    let missing = todo(&["done", "1"]).unwrap_err();
    assert_eq!(missing.to_string(), "record 1 not found in bucket \"todos\"");
    assert!(todo(&[]).unwrap().starts_with("todo add TEXT") && todo(&["sing"]).is_err());
}
