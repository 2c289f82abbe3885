//! Programs that use mlx5dv or raw packets, with rdma-core's libmlx5 and with the plugin.

#[macro_use]
mod common;

use common::*;

/// Runs a program of `c/`, which prints `well` on success.
fn runs(source: &str, provider: Provider) {
    runs_on("roce", source, provider);
}

/// [`runs`], on a kind of port.
fn runs_on(port: &'static str, source: &str, provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, port);
    let libraries = ["-lmlx5", "-libverbs"];
    let Some(program) = compiled("cc", source, &libraries, &world.directory) else {
        return;
    };
    let line = program.display().to_string();
    let mut run = world.start(&line, "output.txt");
    assert_eq!(run.good().trim(), "well");
    world.finish();
}

/// The program accesses queues directly.
fn drives_queues(provider: Provider) {
    runs("direct.c", provider);
}

/// The program misuses queues.
fn drives_queues_wrongly(provider: Provider) {
    runs("wrong.c", provider);
}

/// libmlx5 uses a destroyed key of an aborted batch, and crashes.
#[test]
fn careless_programs_work() {
    runs("careless.c", Provider::Ours);
}

fn uses_dynamic_connections(provider: Provider) {
    runs("dynamic.c", provider);
}

fn allocates_queue_memory(provider: Provider) {
    runs("allocators.c", provider);
}

fn chooses_ports_of_a_bond(provider: Provider) {
    runs("bond.c", provider);
}

fn shares_objects(provider: Provider) {
    runs("sharing.c", provider);
}

fn exchanges_raw_packets(provider: Provider) {
    runs("packets.c", provider);
}

/// libmlx5 creates no such queue on Ethernet ([`a_program_matches_tags_on_ethernet`]).
fn matches_tags(provider: Provider) {
    runs_on("ib", "tags.c", provider);
}

#[test]
fn a_program_matches_tags_on_ethernet() {
    runs_on("roce", "tags.c", Provider::Ours);
}

/// Supported by libmlx5 since rdma-core 55.
#[test]
fn a_program_receives_out_of_order() {
    let header = std::fs::read_to_string("/usr/include/infiniband/mlx5dv.h");
    let stock_has = header.is_ok_and(|header| header.contains("MLX5DV_QP_CREATE_OOO_DP"));
    for port in ["roce", "ib"] {
        runs_on(port, "out_of_order.c", Provider::Ours);
        if stock_has {
            runs_on(port, "out_of_order.c", Provider::Stock);
        }
    }
}

/// Devices access the pages that were registered, whatever the program does to their mappings.
fn keeps_registered_pages(provider: Provider) {
    for devices in ["roce", "ib,ib"] {
        runs_on(devices, "pinned.c", provider);
    }
}

/// Devices access DMA buffers.
fn registers_dma_buffers(provider: Provider) {
    for devices in ["roce", "ib"] {
        runs_on(devices, "dma_buffer.c", provider);
    }
}

with_each_provider! {
    a_program_registers_dma_buffers: registers_dma_buffers;
    registered_memory_is_pinned: keeps_registered_pages;
    a_program_matches_tags: matches_tags;
    a_program_shares_objects: shares_objects;
    a_program_chooses_ports_of_a_bond: chooses_ports_of_a_bond;
    a_program_allocates_queue_memory: allocates_queue_memory;
    a_program_exchanges_raw_packets: exchanges_raw_packets;
    a_program_uses_dynamic_connections: uses_dynamic_connections;
    a_program_drives_queues_itself: drives_queues;
    a_program_drives_queues_wrongly: drives_queues_wrongly;
}
