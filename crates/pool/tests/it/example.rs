#[path = "../../examples/tour.rs"]
mod tour;

#[test]
fn the_tour_runs() {
    tour::main();
}
