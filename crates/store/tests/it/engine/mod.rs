//! Tests of the engines, through their API.

mod backup;
mod contract;
mod corruption;
mod crash_simulation;
mod disk_failure;
mod file_descriptors;
mod file_modes;
mod model;
pub(crate) mod sim_disk;
mod speed;
