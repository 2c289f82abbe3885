//! The same as `main.rs`, on ConnectX's queues (`cargo xtask bench --device mlx5`).
//! A program of its own, so that neither changes how the other is compiled.

mod connectx;
mod measure;
mod rows;
mod standin;
mod stepper;

fn main() -> std::process::ExitCode {
    measure::main::<connectx::ConnectX>()
}
