//! What the device says of itself: the kernel's answer.

use super::Rxe;
use crate::device::Device;

impl Device for Rxe {}
