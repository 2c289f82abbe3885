//! Compares the ABI's structures and numbers with the installed C headers, if
//! any: each becomes a static assertion in a C file.

use std::fmt::Write as _;

use testing::c_headers::{are_installed, compile};

use crate::abi;

/// C member of a field whose name differs.
fn c_member<'a>(structure: &str, field: &'a str) -> &'a str {
    match (structure, field) {
        ("rdma_ucm_cmd_hdr", "in_len") => "in",
        ("rdma_ucm_cmd_hdr", "out_len") => "out",
        _ => field,
    }
}

/// Parses `pub const NAME: uN = NUMBER;` lines of a module of the source file.
fn constants(module: &str) -> Vec<(&'static str, u64)> {
    let (_, source) = include_str!("../abi.rs")
        .split_once(&format!("pub mod {module} {{"))
        .unwrap();
    let (source, _) = source.split_once("\n}").unwrap();
    let parse = |line: &'static str| {
        let (name, rest) = line.trim().strip_prefix("pub const ")?.split_once(": u")?;
        let number = rest.split_once(" = ")?.1.strip_suffix(';')?;
        Some((name, number.parse().ok()?))
    };
    source.lines().filter_map(parse).collect()
}

fn assertions() -> (String, usize) {
    let mut c = String::from(
        "#include <stddef.h>\n#include <sys/socket.h>\n#include <netinet/in.h>\n\
         #include <rdma/ib_user_verbs.h>\n#include <rdma/rdma_user_cm.h>\n",
    );
    let mut count = 0;
    let mut assert = |what: String| {
        count += 1;
        writeln!(c, "_Static_assert({what}, \"here it is not so: {what}\");").unwrap();
    };
    for (name, size, fields) in abi::STRUCTURES {
        assert(format!("sizeof(struct {name}) == {size}"));
        for (field, offset, size) in *fields {
            let member = c_member(name, field);
            assert(format!("offsetof(struct {name}, {member}) == {offset}"));
            assert(format!("sizeof(((struct {name} *)0)->{member}) == {size}"));
        }
    }
    for (module, prefix) in [
        ("cmd", "RDMA_USER_CM_"),
        ("query", "RDMA_USER_CM_"),
        ("option", "RDMA_"),
    ] {
        for (name, number) in constants(module) {
            assert(format!("{prefix}{name} == {number}"));
        }
    }
    for (name, number) in [
        ("RDMA_USER_CM_ABI_VERSION", abi::ABI_VERSION as usize),
        ("RDMA_MAX_PRIVATE_DATA", abi::MAX_PRIVATE_DATA),
        ("AF_IB", usize::from(abi::AF_IB)),
        ("sizeof(struct sockaddr_in)", abi::SOCKADDR_IN),
        ("sizeof(struct sockaddr_in6)", abi::SOCKADDR_IN6),
        ("RDMA_PS_IPOIB", crate::PortSpace::IPOIB.0.into()),
        ("RDMA_PS_IB", crate::PortSpace::IB.0.into()),
        ("RDMA_PS_TCP", crate::PortSpace::TCP.0.into()),
        ("RDMA_PS_UDP", crate::PortSpace::UDP.0.into()),
        ("RDMA_MC_JOIN_FLAG_FULLMEMBER", 0),
        ("RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER", 1),
    ] {
        assert(format!("{name} == {number}"));
    }
    (c, count)
}

#[test]
fn the_c_headers_agree() {
    if !are_installed("#include <rdma/rdma_user_cm.h>\n", "linux-libc-dev") {
        return;
    }
    let (c, count) = assertions();
    assert!(count > 400, "only {count} assertions");
    if let Some(Err(complaints)) = compile(&c) {
        panic!("{complaints}");
    }
    // A wrong assertion must fail to compile.
    let wrong = c.replace(
        "sizeof(struct rdma_ucm_event_resp) == 336",
        "sizeof(struct rdma_ucm_event_resp) == 335",
    );
    assert!(matches!(compile(&wrong), Some(Err(_))));
}
