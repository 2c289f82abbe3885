//! The tests of the example project, compiled here: the project itself is outside of
//! the workspace, and would build everything again.

// Its tests name the crate that they test.
extern crate self as counter;

#[path = "../example-project/tests/faults.rs"]
mod faults;
#[path = "../example-project/src/lib.rs"]
mod program;

pub use program::{Client, Error, Server};
