//! Property test: under random rules and requests, no client receives a record that its session may not read.
//!
//! Every version of every record has a unique mark. A model of the rules, independent of the server's, determines which marks a
//! session may see by which operation, and every message is searched for marks.

mod driver;
mod policy;
mod random;

use self::driver::run;

/// Prints the seed of each case. `TIDEWIRE_SEED` repeats one case, and `TIDEWIRE_CASES` sets the number of cases.
#[tokio::test(flavor = "multi_thread")]
async fn no_client_receives_a_record_it_may_not_see() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("TIDEWIRE_SEED") {
        run(seed).await;
        return;
    }
    for seed in 0..number("TIDEWIRE_CASES").unwrap_or(6) {
        run(seed).await;
    }
}
