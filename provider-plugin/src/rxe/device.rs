//! Device queries: the kernel's answer.

use super::Rxe;
use crate::device::QueryOps;

impl QueryOps for Rxe {}
