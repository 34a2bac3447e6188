//! The memory of rows, measured in a separate process.

use std::collections::BTreeMap;
use std::process;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_store::{Store, StoreOptions};

use super::super::{Effort, resident_bytes};
use super::contender::{Reader as _, RowStore as _, fill, runtime};
use super::ours::Ours;
use super::row::{self, Rows};
use crate::role::Role;

pub(super) const HOLD: Role = Role { name: "store-hold", run: hold };

pub(super) fn per_row(effort: Effort) -> Workload {
    let rows = effort.operations(200_000);
    let contender = |name| Contender::new(name, move |meter| round(meter, name, rows));
    Workload {
        name: "store-memory",
        about: format!(
            "{rows} rows of {} bytes without an index: growth of the resident memory of the process that holds them. The history \
             of commits, which has its own limit, is disabled. \"BTreeMap\" is a map from keys to JSON texts.",
            row::BYTES
        ),
        operation: "row",
        metrics: &[Metric::Memory],
        contenders: vec![contender("BTreeMap"), contender("tidewire-store")],
    }
}

fn round(meter: Meter, name: &str, rows: u64) -> Sample {
    let mut grown = 0;
    let sample = meter.measure(rows, || {
        let process = HOLD.start(&[name.into(), rows.to_string()]);
        grown = process.wait_for_line("resident memory has grown by ").parse().expect("a number of bytes");
    });
    sample.with_amount(Metric::Memory, grown)
}

/// Stores rows and prints the growth of the resident memory. A few rows are stored before, to warm up.
fn hold(arguments: &[String]) {
    let [name, rows] = arguments else { panic!("expected the name of a store and a number of rows") };
    let end: u64 = rows.parse().expect("a number of rows");
    let (first, rows) = (end / 50, Rows::new(end));
    match name.as_str() {
        "BTreeMap" => {
            let mut map = BTreeMap::new();
            let add =
                |map: &mut BTreeMap<u64, String>, ids| map.extend(Iterator::map(ids, |id| (id, rows.row(id).text)));
            add(&mut map, 0..first);
            let before = resident_bytes(process::id());
            add(&mut map, first..first + end);
            print_growth(before);
            assert!(map.len() as u64 == first + end, "all rows are stored");
        }
        "tidewire-store" => {
            let store = Ours::without_index(Store::memory(StoreOptions::default().history_bytes(0)));
            let runtime = runtime();
            fill(&runtime, &store, rows, 0, first);
            let before = resident_bytes(process::id());
            fill(&runtime, &store, rows, first, first + end);
            print_growth(before);
            assert!(store.reader().count() == first + end, "all rows are stored");
        }
        _ => panic!("unknown store {name}"),
    }
}

fn print_growth(before: u64) {
    println!("resident memory has grown by {}", resident_bytes(process::id()).saturating_sub(before));
}
