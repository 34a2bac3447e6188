//! Whatever the rules, whoever asks for whatever: nothing that arrives on a socket has a record in it that may not be read there.
//!
//! Every version of every record has a mark of its own. A reading of the rules that knows nothing of the server's says which marks
//! a session may see by which operation, and every message is searched for marks.

mod driver;
mod laws;
mod random;

use self::driver::run;

/// Prints the seed first: a case that fails is run again with `TIDEWIRE_SEED`, and a long run has `TIDEWIRE_CASES` of them.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_told_that_may_not_be_known() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("TIDEWIRE_SEED") {
        run(seed).await;
        return;
    }
    for seed in 0..number("TIDEWIRE_CASES").unwrap_or(6) {
        run(seed).await;
    }
}
