//! Libraries that look like libibverbs of every release.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::{HERE, cc};

const DATA: &str = include_str!("../data/rdma-core-layouts.txt");

/// The layout of a sampled release, from its headers.
struct Sample {
    pabi: u32,
    releases: Vec<u32>,
    ops: Vec<&'static str>,
    context_offset: usize,
    comp_mask_offset: usize,
}

fn samples() -> Vec<Sample> {
    let mut out: Vec<Sample> = Vec::new();
    let mut current = "";
    for line in DATA.lines().filter(|l| !l.starts_with('#')) {
        let words: Vec<&'static str> = line.split(' ').collect();
        match (words[0], current) {
            ("layout", _) => {
                let releases = words[2..].iter().map(|r| r.split('.').next().unwrap());
                out.push(Sample {
                    pabi: words[1].parse().unwrap(),
                    releases: releases.map(|r| r.parse().unwrap()).collect(),
                    ops: Vec::new(),
                    context_offset: 0,
                    comp_mask_offset: 0,
                });
            }
            ("struct", _) => current = words[1],
            (_, "verbs_context_ops") => out.last_mut().unwrap().ops.push(words[2]),
            (offset, "verbs_context") if words[2] == "context" => {
                out.last_mut().unwrap().context_offset = offset.parse().unwrap();
            }
            (offset, "verbs_qp") if words[2] == "comp_mask" => {
                out.last_mut().unwrap().comp_mask_offset = offset.parse().unwrap();
            }
            _ => {}
        }
    }
    out
}

/// The layout of a release: that of the newest sample that is not newer.
fn sample_of(release: u32) -> Sample {
    samples()
        .into_iter()
        .rev()
        .find(|s| s.releases[0] <= release)
        .unwrap()
}

/// The properties of a fake library.
pub struct Fake {
    pub release: u32,
    pub pabi: u32,
    /// File name; `None`: that of the release.
    pub name: Option<String>,
    /// Release whose operations it has.
    pub ops_of: u32,
    /// Release whose `verbs_context` it has.
    pub context_of: u32,
    /// Version in its package note; `None`: no note.
    pub package: Option<&'static str>,
}

fn minor(release: u32) -> u32 {
    match release {
        ..=34 => 12,
        35 => 13,
        36..=58 => 14,
        59..=61 => 15,
        62..=63 => 16,
        64 => 17,
        _ => 18,
    }
}

impl Fake {
    pub fn of(release: u32) -> Fake {
        Fake {
            release,
            pabi: sample_of(release).pabi,
            name: None,
            ops_of: release,
            context_of: release,
            package: None,
        }
    }

    pub fn build(&self, dir: &Path) -> PathBuf {
        let dir = dir.join(format!("fake-{}-{}", self.release, self.pabi));
        fs::create_dir_all(&dir).unwrap();
        let mut ops = String::from("static const char *const op_names[] = {\n");
        for op in &sample_of(self.ops_of).ops {
            writeln!(ops, "\t\"{op}\",").unwrap();
        }
        ops.push_str("};\n");
        fs::write(dir.join("ops.h"), ops).unwrap();

        let public = [
            (35, "1.13", "ibv_import_dm"),
            (36, "1.14", "ibv_query_qp_data_in_order"),
            (59, "1.15", "ibv_alloc_dmah"),
            (62, "1.16", "ibv_dm_export_dmabuf_fd"),
            (64, "1.17", "ibv_alloc_buf"),
            (65, "1.18", "ibv_create_comp_cntr"),
        ];
        let mut map = String::from(
            "IBVERBS_1.0 { global: fake_*; local: *; };\n\
             IBVERBS_1.6 { global: ibv_qp_to_qp_ex; };\n",
        );
        for (_, version, name) in public.iter().filter(|m| m.0 <= self.release) {
            writeln!(map, "IBVERBS_{version} {{ global: {name}; }};").unwrap();
        }
        let mut private = String::from(
            "_verbs_init_and_alloc_context; verbs_set_ops; verbs_uninit_context; \
             verbs_allow_disassociate_destroy; ",
        );
        for (_, name) in [(37, "__verbs_log"), (49, "ibv_wr_opcode_str")]
            .iter()
            .filter(|m| m.0 <= self.release)
        {
            write!(private, "{name}; ").unwrap();
        }
        let pabi = self.pabi;
        writeln!(
            map,
            "IBVERBS_PRIVATE_{pabi} {{ global: {private} verbs_register_driver_{pabi}; }};"
        )
        .unwrap();
        fs::write(dir.join("map"), map).unwrap();

        let own_name = format!("libibverbs.so.1.{}.{}.0", minor(self.release), self.release);
        let library = dir.join(self.name.as_ref().unwrap_or(&own_name));
        let package = match self.package {
            Some(version) => format!("-DPACKAGE=\"{version}\""),
            None => "-UPACKAGE".to_owned(),
        };
        cc(&[
            &package,
            &format!(
                "-DCOMP_MASK_OFFSET={}",
                sample_of(self.release).comp_mask_offset
            ),
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            &format!("-DPABI={pabi}"),
            &format!("-DRELEASE={}", self.release),
            &format!(
                "-DCONTEXT_OFFSET={}",
                sample_of(self.context_of).context_offset
            ),
            &format!("-I{}", dir.display()),
            &format!("-Wl,--version-script={}", dir.join("map").display()),
            "-Wl,-soname,libibverbs.so.1",
            "-o",
            library.to_str().unwrap(),
            &format!("{HERE}/tests/c/fake_libibverbs.c"),
            "-ldl",
        ]);
        library
    }
}
