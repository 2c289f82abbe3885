//! The rooms of the crate: which folder may use which, and how many files import each other.

use testing::modules::Modules;

/// The rooms, folders or files, each with those below it. All other files are below them.
const ROOMS: [(&str, &[&str]); 10] = [
    ("engine", &[]),
    ("hca", &["engine"]),
    ("command", &["engine", "hca"]),
    ("profiles", &["command", "engine"]),
    ("health", &["engine", "hca"]),
    ("late", &["engine", "hca"]),
    ("inject", &["engine", "hca"]),
    ("queue_depths", &["engine", "hca"]),
    ("control", &["hca"]),
    ("vfio", &["control", "hca"]),
];
/// Most files that import each other in a circle: the engine's core has the tables of
/// objects, whose files extend it.
const MAX_CIRCLE: usize = 10;

fn modules() -> Modules {
    let modules = Modules::read(env!("CARGO_MANIFEST_DIR"), &["bin", "testing"]);
    assert!(modules.text.len() > 50, "{}", modules.text.len());
    modules
}

#[test]
fn no_arrow_points_up() {
    modules().assert_no_arrow_points_up(&ROOMS);
}

#[test]
fn circles_are_small() {
    modules().assert_circles_are_small(MAX_CIRCLE);
}
