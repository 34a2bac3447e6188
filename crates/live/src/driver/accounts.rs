//! Accounting of owners: the work of their live queries at commits, and the memory of the retained rows.
//!
//! **Work** is counted by the matcher, in units of about a nanosecond. The work of a query is divided among its subscribers, so a
//! popular query is cheap for each of them. An owner whose work in one second exceeds the limit loses its costliest subscription.
//!
//! **Memory** is counted in full for each owner that subscribes to a query, and once in the total. A subscription that exceeds a
//! limit is rejected. If live queries grow beyond a limit, the largest queries of the owner, or of all owners, end.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::Driver;
use crate::live::{LiveError, MemoryLimit};
use crate::matcher::QueryId;
use crate::subscription::SubscriptionEnd;

/// The subscriptions of an owner, and their work in the current window.
struct Account {
    subscriptions: HashSet<u64>,
    /// The start of the window.
    window_start: Instant,
    /// The work in the window, by subscription.
    work: HashMap<u64, u64>,
    total_work: u64,
}

/// The accounts of all owners.
#[derive(Default)]
pub(super) struct Accounts {
    by_owner: HashMap<u64, Account>,
    /// The owners of the subscriptions, by subscription id.
    owners: HashMap<u64, u64>,
    /// The memory of all queries at the last check.
    checked_bytes: usize,
}

/// The time window over which work is summed.
const WINDOW: Duration = Duration::from_secs(1);
/// Growth of the memory of live queries after which the limits are checked again.
const CHECK_BYTES: usize = 1 << 20;

impl Accounts {
    pub(super) fn open(&mut self, id: u64, owner: u64, now: Instant) {
        self.owners.insert(id, owner);
        let new = || Account { subscriptions: HashSet::new(), window_start: now, work: HashMap::new(), total_work: 0 };
        self.by_owner.entry(owner).or_insert_with(new).subscriptions.insert(id);
    }

    pub(super) fn owner(&self, id: u64) -> Option<u64> {
        self.owners.get(&id).copied()
    }

    pub(super) fn close(&mut self, id: u64) {
        let Some(owner) = self.owners.remove(&id) else { return };
        let Some(account) = self.by_owner.get_mut(&owner) else { return };
        account.subscriptions.remove(&id);
        account.work.remove(&id);
        if account.subscriptions.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    /// Charges work to the owner of a subscription. Returns the costliest subscription of the owner if the limit is exceeded.
    fn charge(&mut self, id: u64, work: u64, max_work: u64, now: Instant) -> Option<u64> {
        let account = self.by_owner.get_mut(self.owners.get(&id)?)?;
        if now.duration_since(account.window_start) >= WINDOW {
            (account.window_start, account.total_work) = (now, 0);
            account.work.clear();
        }
        account.total_work = account.total_work.saturating_add(work);
        *account.work.entry(id).or_insert(0) += work;
        if account.total_work <= max_work {
            return None;
        }
        let costliest = account.work.iter().max_by_key(|(_, work)| **work).map(|(id, _)| *id)?;
        account.total_work -= account.work.remove(&costliest).unwrap_or(0);
        Some(costliest)
    }
}

impl Driver {
    /// Charges each query's work since the last call, divided equally among its subscribers, to the owners of the subscribers.
    pub(super) fn charge_work(&mut self) {
        let charged = self.matcher.take_work();
        if charged.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut too_costly = Vec::new();
        for (query, work) in charged {
            let subscribers = self.matcher.subscribers(query);
            let share = work / (subscribers.len() as u64).max(1);
            let charge = |id: &u64| self.accounts.charge(*id, share, self.options.max_owner_work, now);
            too_costly.extend(subscribers.iter().filter_map(charge));
        }
        for id in too_costly {
            self.end_costly(id);
        }
    }

    pub(super) fn end_costly(&mut self, id: u64) {
        if self.subscribers.contains_key(&id) {
            self.shared.counters.too_costly.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.end(id, SubscriptionEnd::TooCostly);
        }
    }

    /// Checks that a subscriber can be added to a live query within the memory limits of its owner and in total.
    pub(super) fn check_memory(&self, id: u64, query: QueryId) -> Result<(), LiveError> {
        let max = self.options.max_bytes;
        if self.matcher.kept_bytes() > max && self.matcher.subscribers(query).is_empty() {
            return Err(LiveError::TooLarge { limit: MemoryLimit::Total, max });
        }
        let max = self.options.max_owner_bytes;
        let Some(owner) = self.accounts.owners.get(&id) else { return Ok(()) };
        let mut queries = self.queries_of(*owner);
        queries.insert(query);
        let bytes: usize = queries.into_iter().map(|query| self.matcher.bytes_of(query)).sum();
        if bytes > max { Err(LiveError::TooLarge { limit: MemoryLimit::Owner, max }) } else { Ok(()) }
    }

    fn queries_of(&self, owner: u64) -> HashSet<QueryId> {
        let account = self.accounts.by_owner.get(&owner);
        let ids = account.into_iter().flat_map(|account| &account.subscriptions);
        ids.filter_map(|id| self.matcher.query_of(*id)).collect()
    }

    /// Ends the largest queries if the live queries of an owner, or of all owners, exceed a memory limit.
    pub(super) fn check_growth(&mut self) {
        let kept = self.matcher.kept_bytes();
        self.accounts.checked_bytes = self.accounts.checked_bytes.min(kept);
        let step = CHECK_BYTES.min(self.options.max_owner_bytes / 16);
        if kept <= self.options.max_bytes && kept - self.accounts.checked_bytes <= step {
            return;
        }
        let owners: Vec<u64> = self.accounts.by_owner.keys().copied().collect();
        for owner in owners {
            let mut sizes: Vec<(usize, QueryId)> =
                self.queries_of(owner).into_iter().map(|query| (self.matcher.bytes_of(query), query)).collect();
            sizes.sort_unstable_by_key(|(bytes, _)| *bytes);
            let mut total: usize = sizes.iter().map(|(bytes, _)| *bytes).sum();
            while total > self.options.max_owner_bytes
                && let Some((bytes, query)) = sizes.pop()
            {
                total -= bytes;
                let ids = self.matcher.subscribers(query).iter().copied();
                for id in ids.filter(|id| self.accounts.owners.get(id) == Some(&owner)).collect::<Vec<_>>() {
                    self.end(id, SubscriptionEnd::TooLarge);
                }
            }
        }
        while self.matcher.kept_bytes() > self.options.max_bytes
            && let Some(query) = self.queries.keys().copied().max_by_key(|query| self.matcher.bytes_of(*query))
        {
            for id in self.matcher.subscribers(query).to_vec() {
                self.end(id, SubscriptionEnd::TooLarge);
            }
        }
        self.accounts.checked_bytes = self.matcher.kept_bytes();
    }
}
