//! Programs that use mlx5dv or raw packets, with rdma-core's libmlx5 and with the plugin.

#[macro_use]
mod common;

use common::*;

/// Runs a program of `c/`, which says `well` if all was as it should be.
fn runs(source: &str, provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let libraries = ["-lmlx5", "-libverbs"];
    let Some(program) = compiled("cc", source, &libraries, &world.directory) else {
        return;
    };
    let line = program.display().to_string();
    let mut run = world.start(&line, "output.txt");
    assert_eq!(run.good().trim(), "well");
    world.finish();
}

/// It drives queues itself.
fn drives_queues(provider: Provider) {
    runs("direct.c", provider);
}

/// It drives queues wrongly.
fn drives_queues_wrongly(provider: Provider) {
    runs("wrong.c", provider);
}

fn uses_dynamic_connections(provider: Provider) {
    runs("dynamic.c", provider);
}

fn exchanges_raw_packets(provider: Provider) {
    runs("packets.c", provider);
}

with_each_provider! {
    a_program_exchanges_raw_packets: exchanges_raw_packets;
    a_program_uses_dynamic_connections: uses_dynamic_connections;
    a_program_drives_queues_itself: drives_queues;
    a_program_drives_queues_wrongly: drives_queues_wrongly;
}
