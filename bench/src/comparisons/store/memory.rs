//! The memory that rows take, of a process that has nothing else.

use std::collections::BTreeMap;
use std::process;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_store::{Store, StoreOptions};

use super::super::{Effort, resident};
use super::contender::{Reader as _, RowStore as _, fill, runtime};
use super::ours::Ours;
use super::row::{self, Rows};
use crate::role::Role;

pub(super) const HOLD: Role = Role { name: "store-hold", play: hold };

pub(super) fn per_row(effort: Effort) -> Workload {
    let rows = effort.operations(200_000);
    let contender = |name| Contender::new(name, move |meter| round(meter, name, rows));
    Workload {
        name: "store-memory",
        about: format!(
            "{rows} rows of {} bytes without an index: by how much the resident memory of the process has grown that holds them. \
             The latest commits, which are kept for followers within a limit of their own, are left out. The least one can do is \
             a map of keys and texts.",
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
        grown = process.wait_for_line("has grown by ").parse().expect("a number of bytes");
    });
    sample.with_amount(Metric::Memory, grown)
}

/// Holds so many rows, beside a few that make whatever is made once.
fn hold(arguments: &[String]) {
    let [name, rows] = arguments else { panic!("it is told what holds the rows, and how many") };
    let end: u64 = rows.parse().expect("a number of rows");
    let (first, rows) = (end / 50, Rows::new(end));
    match name.as_str() {
        "BTreeMap" => {
            let mut map = BTreeMap::new();
            let add =
                |map: &mut BTreeMap<u64, String>, ids| map.extend(Iterator::map(ids, |id| (id, rows.row(id).text)));
            add(&mut map, 0..first);
            let before = resident(process::id());
            add(&mut map, first..first + end);
            tell(before);
            assert!(map.len() as u64 == first + end, "all are there");
        }
        "tidewire-store" => {
            let store = Ours::without_index(Store::memory(StoreOptions::default().history_bytes(0)));
            let runtime = runtime();
            fill(&runtime, &store, rows, 0, first);
            let before = resident(process::id());
            fill(&runtime, &store, rows, first, first + end);
            tell(before);
            assert!(store.reader().count() == first + end, "all are there");
        }
        _ => panic!("there is no {name}"),
    }
}

fn tell(before: u64) {
    println!("has grown by {}", resident(process::id()).saturating_sub(before));
}
