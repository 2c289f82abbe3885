//! A program that drives the queues of a ConnectX itself, with rdma-core's libmlx5 and
//! with the plugin.

#[macro_use]
mod common;

use common::*;

fn drives_queues(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let libraries = ["-lmlx5", "-libverbs"];
    let Some(program) = compiled("cc", "direct.c", &libraries, &world.directory) else {
        return;
    };
    let line = program.display().to_string();
    let mut run = world.start(&line, "direct.txt");
    assert_eq!(run.good().trim(), "well");
    world.finish();
}

with_each_provider! {
    a_program_drives_queues_itself: drives_queues;
}
