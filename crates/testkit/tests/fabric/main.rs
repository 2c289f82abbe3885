//! Tests of the kit: simulated time, faults, captures, leaks.

mod connections;
mod determinism;
mod errors;
mod exhaustive;
mod faults;
mod leaks;
mod pair;
mod recording;
mod tasks;
mod threads;
mod time;
