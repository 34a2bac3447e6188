use std::panic::catch_unwind;
use std::time::Duration;

use tidewire_testkit::{PATIENCE, wait_until, wait_until_async};

#[test]
fn returns_when_the_condition_holds() {
    let mut asked = 0;
    wait_until("asked three times", PATIENCE, || {
        asked += 1;
        asked == 3
    });
    assert_eq!(asked, 3);
}

#[test]
fn a_timeout_names_the_condition() {
    let panic = catch_unwind(|| wait_until("pigs fly", Duration::from_millis(5), || false)).unwrap_err();
    assert_eq!(panic.downcast_ref::<String>().unwrap(), "timed out after 5ms waiting until pigs fly");
}

#[test]
fn the_async_wait_does_not_block_other_tasks() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let other = tokio::spawn(async { 7 });
        wait_until_async("the other task is done", PATIENCE, async || other.is_finished()).await;
        assert_eq!(other.await.unwrap(), 7);
    });
}
