//! The data path of the raw and the safe layer on rdma_rxe's queues, as `cargo
//! xtask bench` measures it: on the stand-in for the kernel that the C program is
//! measured on
//! (`provider-plugin/bench`), on queues of the same geometry, and in the same
//! way. It is preloaded; this program finds the device by sysfs, opens it, and
//! makes its queues through the crate's own system calls.
//!
//!     datapath time [SAMPLES]   nanoseconds of an operation, median of samples
//!     datapath count            exact instructions, locked ones and fences
//!     datapath trace ROW        where each counted instruction of a round is
//!
//! It prints a line for each row, as the C program does:
//!
//!     time ROW NS
//!     count ROW INSTRUCTIONS LOCKED FENCES
//!
//! A figure is of one operation. Time: 64 rounds are timed together; in a round
//! the device acts once and the row's calls follow. Where the safe layer has to
//! be given back what it owns after each round, each round is timed by itself
//! and the times are added up. The same around nothing, and the doorbell's
//! write, are measured alone and subtracted. Each row is checked first.

mod measure;
mod rows;
mod rxe;
mod rxe_ring;
mod standin;
mod stepper;

fn main() -> std::process::ExitCode {
    measure::main::<rxe::Rxe>()
}
