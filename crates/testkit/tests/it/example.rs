#[path = "../../examples/outage.rs"]
mod outage;

#[test]
fn the_example_runs() {
    outage::main();
}
