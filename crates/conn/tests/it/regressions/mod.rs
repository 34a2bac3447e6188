//! Regression tests. Each comment describes the bug that the test reproduces, or quotes the documentation that it violated.

mod clients;
mod connections;
mod pushes;
mod websocket;
