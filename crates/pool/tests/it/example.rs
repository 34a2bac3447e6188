#[path = "../../examples/tour.rs"]
mod tour;

#[test]
fn tour_example_runs() {
    tour::main();
}
