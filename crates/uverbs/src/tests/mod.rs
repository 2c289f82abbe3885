//! Tests of the whole crate against the fake kernel.
