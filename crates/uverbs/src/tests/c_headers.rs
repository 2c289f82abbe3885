//! Compares the ABI's structures and numbers with the installed C headers, if
//! any: each becomes a static assertion in a C file.

use std::fmt::Write as _;

use testing::c_headers::{are_installed, compile};

use crate::abi::{ids, ioctl, netlink, verbs, write};

type Fields = &'static [(&'static str, usize, usize)];

/// C structure, size, fields.
fn structures() -> Vec<(&'static str, usize, Fields)> {
    vec![
        (
            "ib_uverbs_attr",
            size_of::<ioctl::Attr>(),
            ioctl::Attr::FIELDS,
        ),
        (
            "ib_uverbs_ioctl_hdr",
            size_of::<ioctl::IoctlHdr>(),
            ioctl::IoctlHdr::FIELDS,
        ),
        (
            "ib_uverbs_qp_cap",
            size_of::<verbs::QpCap>(),
            verbs::QpCap::FIELDS,
        ),
        (
            "ib_uverbs_query_port_resp_ex",
            size_of::<verbs::QueryPortRespEx>(),
            verbs::QueryPortRespEx::FIELDS,
        ),
        (
            "ib_uverbs_gid_entry",
            size_of::<verbs::GidEntry>(),
            verbs::GidEntry::FIELDS,
        ),
        (
            "nlmsghdr",
            size_of::<netlink::NlMsgHdr>(),
            netlink::NlMsgHdr::FIELDS,
        ),
        (
            "nlattr",
            size_of::<netlink::NlAttr>(),
            netlink::NlAttr::FIELDS,
        ),
        (
            "ib_uverbs_async_event_desc",
            size_of::<write::AsyncEventDesc>(),
            write::AsyncEventDesc::FIELDS,
        ),
        (
            "ib_uverbs_comp_event_desc",
            size_of::<write::CompEventDesc>(),
            write::CompEventDesc::FIELDS,
        ),
        (
            "ib_uverbs_cq_moderation_caps",
            size_of::<write::CqModerationCaps>(),
            write::CqModerationCaps::FIELDS,
        ),
        (
            "ib_uverbs_cmd_hdr",
            size_of::<write::CmdHdr>(),
            write::CmdHdr::FIELDS,
        ),
        (
            "ib_uverbs_query_device",
            size_of::<write::QueryDevice>(),
            write::QueryDevice::FIELDS,
        ),
        (
            "ib_uverbs_query_device_resp",
            size_of::<write::QueryDeviceResp>(),
            write::QueryDeviceResp::FIELDS,
        ),
        (
            "ib_uverbs_ex_query_device",
            size_of::<write::ExQueryDevice>(),
            write::ExQueryDevice::FIELDS,
        ),
        (
            "ib_uverbs_odp_caps",
            size_of::<write::OdpCaps>(),
            write::OdpCaps::FIELDS,
        ),
        (
            "ib_uverbs_rss_caps",
            size_of::<write::RssCaps>(),
            write::RssCaps::FIELDS,
        ),
        (
            "ib_uverbs_tm_caps",
            size_of::<write::TmCaps>(),
            write::TmCaps::FIELDS,
        ),
        (
            "ib_uverbs_ex_query_device_resp",
            size_of::<write::ExQueryDeviceResp>(),
            write::ExQueryDeviceResp::FIELDS,
        ),
        (
            "ib_uverbs_query_port_resp",
            size_of::<write::QueryPortResp>(),
            write::QueryPortResp::FIELDS,
        ),
        (
            "ib_uverbs_alloc_pd",
            size_of::<write::AllocPd>(),
            write::AllocPd::FIELDS,
        ),
        (
            "ib_uverbs_alloc_pd_resp",
            size_of::<write::AllocPdResp>(),
            write::AllocPdResp::FIELDS,
        ),
        (
            "ib_uverbs_open_xrcd",
            size_of::<write::OpenXrcd>(),
            write::OpenXrcd::FIELDS,
        ),
        (
            "ib_uverbs_open_xrcd_resp",
            size_of::<write::OpenXrcdResp>(),
            write::OpenXrcdResp::FIELDS,
        ),
        (
            "ib_uverbs_reg_mr",
            size_of::<write::RegMr>(),
            write::RegMr::FIELDS,
        ),
        (
            "ib_uverbs_reg_mr_resp",
            size_of::<write::RegMrResp>(),
            write::RegMrResp::FIELDS,
        ),
        (
            "ib_uverbs_rereg_mr",
            size_of::<write::ReregMr>(),
            write::ReregMr::FIELDS,
        ),
        (
            "ib_uverbs_rereg_mr_resp",
            size_of::<write::ReregMrResp>(),
            write::ReregMrResp::FIELDS,
        ),
        (
            "ib_uverbs_alloc_mw",
            size_of::<write::AllocMw>(),
            write::AllocMw::FIELDS,
        ),
        (
            "ib_uverbs_alloc_mw_resp",
            size_of::<write::AllocMwResp>(),
            write::AllocMwResp::FIELDS,
        ),
        (
            "ib_uverbs_create_flow",
            size_of::<write::CreateFlow>(),
            write::CreateFlow::FIELDS,
        ),
        (
            "ib_uverbs_flow_attr",
            size_of::<write::FlowAttr>(),
            write::FlowAttr::FIELDS,
        ),
        (
            "ib_uverbs_create_flow_resp",
            size_of::<write::CreateFlowResp>(),
            write::CreateFlowResp::FIELDS,
        ),
        (
            "ib_uverbs_ex_modify_wq",
            size_of::<write::ExModifyWq>(),
            write::ExModifyWq::FIELDS,
        ),
        (
            "ib_uverbs_ex_create_rwq_ind_table",
            size_of::<write::ExCreateRwqIndTable>(),
            write::ExCreateRwqIndTable::FIELDS,
        ),
        (
            "ib_uverbs_ex_create_rwq_ind_table_resp",
            size_of::<write::ExCreateRwqIndTableResp>(),
            write::ExCreateRwqIndTableResp::FIELDS,
        ),
        (
            "ib_uverbs_destroy_flow",
            size_of::<write::DestroyFlow>(),
            write::DestroyFlow::FIELDS,
        ),
        (
            "ib_uverbs_ex_destroy_rwq_ind_table",
            size_of::<write::ExDestroyRwqIndTable>(),
            write::ExDestroyRwqIndTable::FIELDS,
        ),
        (
            "ib_uverbs_create_comp_channel",
            size_of::<write::CreateCompChannel>(),
            write::CreateCompChannel::FIELDS,
        ),
        (
            "ib_uverbs_create_comp_channel_resp",
            size_of::<write::CreateCompChannelResp>(),
            write::CreateCompChannelResp::FIELDS,
        ),
        (
            "ib_uverbs_resize_cq",
            size_of::<write::ResizeCq>(),
            write::ResizeCq::FIELDS,
        ),
        (
            "ib_uverbs_resize_cq_resp",
            size_of::<write::ResizeCqResp>(),
            write::ResizeCqResp::FIELDS,
        ),
        (
            "ib_uverbs_req_notify_cq",
            size_of::<write::ReqNotifyCq>(),
            write::ReqNotifyCq::FIELDS,
        ),
        (
            "ib_uverbs_destroy_cq_resp",
            size_of::<write::DestroyCqResp>(),
            write::DestroyCqResp::FIELDS,
        ),
        (
            "ib_uverbs_global_route",
            size_of::<write::GlobalRoute>(),
            write::GlobalRoute::FIELDS,
        ),
        (
            "ib_uverbs_ah_attr",
            size_of::<write::AhAttr>(),
            write::AhAttr::FIELDS,
        ),
        (
            "ib_uverbs_open_qp",
            size_of::<write::OpenQp>(),
            write::OpenQp::FIELDS,
        ),
        (
            "ib_uverbs_create_qp_resp",
            size_of::<write::CreateQpResp>(),
            write::CreateQpResp::FIELDS,
        ),
        (
            "ib_uverbs_qp_dest",
            size_of::<write::QpDest>(),
            write::QpDest::FIELDS,
        ),
        (
            "ib_uverbs_query_qp",
            size_of::<write::QueryQp>(),
            write::QueryQp::FIELDS,
        ),
        (
            "ib_uverbs_query_qp_resp",
            size_of::<write::QueryQpResp>(),
            write::QueryQpResp::FIELDS,
        ),
        (
            "ib_uverbs_modify_qp",
            size_of::<write::ModifyQp>(),
            write::ModifyQp::FIELDS,
        ),
        (
            "ib_uverbs_ex_modify_qp",
            size_of::<write::ExModifyQp>(),
            write::ExModifyQp::FIELDS,
        ),
        (
            "ib_uverbs_ex_modify_qp_resp",
            size_of::<write::ExModifyQpResp>(),
            write::ExModifyQpResp::FIELDS,
        ),
        (
            "ib_uverbs_destroy_qp_resp",
            size_of::<write::DestroyQpResp>(),
            write::DestroyQpResp::FIELDS,
        ),
        ("ib_uverbs_sge", size_of::<write::Sge>(), write::Sge::FIELDS),
        (
            "ib_uverbs_wc",
            size_of::<write::WorkCompletion>(),
            write::WorkCompletion::FIELDS,
        ),
        (
            "ib_uverbs_post_send",
            size_of::<write::PostSend>(),
            write::PostSend::FIELDS,
        ),
        (
            "ib_uverbs_post_send_resp",
            size_of::<write::PostSendResp>(),
            write::PostSendResp::FIELDS,
        ),
        (
            "ib_uverbs_create_ah",
            size_of::<write::CreateAh>(),
            write::CreateAh::FIELDS,
        ),
        (
            "ib_uverbs_create_ah_resp",
            size_of::<write::CreateAhResp>(),
            write::CreateAhResp::FIELDS,
        ),
        (
            "ib_uverbs_attach_mcast",
            size_of::<write::AttachMcast>(),
            write::AttachMcast::FIELDS,
        ),
        (
            "ib_uverbs_detach_mcast",
            size_of::<write::DetachMcast>(),
            write::DetachMcast::FIELDS,
        ),
        (
            "ib_uverbs_modify_srq",
            size_of::<write::ModifySrq>(),
            write::ModifySrq::FIELDS,
        ),
        (
            "ib_uverbs_query_srq",
            size_of::<write::QuerySrq>(),
            write::QuerySrq::FIELDS,
        ),
        (
            "ib_uverbs_query_srq_resp",
            size_of::<write::QuerySrqResp>(),
            write::QuerySrqResp::FIELDS,
        ),
        (
            "ib_uverbs_destroy_srq_resp",
            size_of::<write::DestroySrqResp>(),
            write::DestroySrqResp::FIELDS,
        ),
        (
            "ib_uverbs_cq_moderation",
            size_of::<write::CqModeration>(),
            write::CqModeration::FIELDS,
        ),
        (
            "ib_uverbs_ex_modify_cq",
            size_of::<write::ExModifyCq>(),
            write::ExModifyCq::FIELDS,
        ),
        (
            "ib_uverbs_send_wr",
            size_of::<write::SendWr>(),
            write::SendWr::FIELDS,
        ),
    ]
}

/// C member of a field whose name differs; empty: none.
fn c_member<'a>(structure: &str, field: &'a str) -> &'a str {
    match (structure, field) {
        ("ib_uverbs_attr", "enum_or_reserved") => "attr_data",
        ("ib_uverbs_query_port_resp_ex", "legacy") => "legacy_resp",
        // Reserved in headers before 6.12, as are its neighbours.
        ("ib_uverbs_query_port_resp_ex", "reserved" | "active_speed_ex") => "",
        ("ib_uverbs_odp_caps", "rc_odp_caps") => "per_transport_caps.rc_odp_caps",
        ("ib_uverbs_odp_caps", "uc_odp_caps") => "per_transport_caps.uc_odp_caps",
        ("ib_uverbs_odp_caps", "ud_odp_caps") => "per_transport_caps.ud_odp_caps",
        ("ib_uverbs_flow_attr", "kind") => "type",
        ("ib_uverbs_send_wr", "imm_or_rkey") => "ex",
        ("nlmsghdr", "len") => "nlmsg_len",
        ("nlmsghdr", "msg_type") => "nlmsg_type",
        ("nlmsghdr", "flags") => "nlmsg_flags",
        ("nlmsghdr", "seq") => "nlmsg_seq",
        ("nlmsghdr", "pid") => "nlmsg_pid",
        ("nlattr", "len") => "nla_len",
        ("nlattr", "attr_type") => "nla_type",
        (_, "_pad") => "",
        _ => field,
    }
}

/// Numbers that the installed headers may be too old for.
#[test]
fn later_c_headers_agree() {
    let mut c = String::from("#include <rdma/ib_user_ioctl_cmds.h>\n");
    let newest = "int newest = UVERBS_METHOD_DMABUF_ALLOC;\n";
    if !are_installed(&c, "linux-libc-dev") {
        return;
    }
    if compile(&format!("{c}{newest}")) != Some(Ok(())) {
        return testing::skip!("the kernel's headers are older than Linux 7.0");
    }
    let mut count = 0;
    for (name, number) in constants(include_str!("../abi/later.rs")) {
        writeln!(c, "_Static_assert(UVERBS_{name} == {number}, \"{name}\");").unwrap();
        count += 1;
    }
    assert_eq!(count, 27);
    if let Some(Err(complaints)) = compile(&c) {
        panic!("{complaints}");
    }
}

/// Parses `pub const NAME: uN = NUMBER;` lines of a source file.
fn constants(source: &'static str) -> impl Iterator<Item = (&'static str, u64)> {
    source.lines().filter_map(|line| {
        let (name, rest) = line.trim().strip_prefix("pub const ")?.split_once(": u")?;
        let number = rest.split_once(" = ")?.1.strip_suffix(';')?;
        Some((name, number.parse().ok()?))
    })
}

fn assertions() -> (String, usize) {
    let mut c = String::from(
        "#include <stddef.h>\n#include <rdma/ib_user_verbs.h>\n#include <rdma/ib_user_ioctl_verbs.h>\n\
         #include <rdma/rdma_user_ioctl_cmds.h>\n#include <rdma/ib_user_ioctl_cmds.h>\n\
         #include <rdma/rdma_netlink.h>\n#include <linux/netlink.h>\n",
    );
    let mut count = 0;
    let mut assert = |what: String| {
        count += 1;
        writeln!(
            c,
            "_Static_assert({what}, \"here it is not so: {}\");",
            what.replace('"', "'")
        )
        .unwrap();
    };
    for (name, size, fields) in structures() {
        assert(format!("sizeof(struct {name}) == {size}"));
        for (field, offset, size) in fields {
            let member = c_member(name, field);
            if !member.is_empty() {
                assert(format!("offsetof(struct {name}, {member}) == {offset}"));
                assert(format!("sizeof(((struct {name} *)0)->{member}) == {size}"));
            }
        }
    }
    for (name, number) in constants(include_str!("../abi/ids.rs")) {
        assert(format!("UVERBS_{name} == {number}"));
    }
    assert(format!("UVERBS_ATTR_UHW_IN == {}", ids::ATTR_UHW_IN));
    assert(format!("UVERBS_ATTR_UHW_OUT == {}", ids::ATTR_UHW_OUT));
    let write = include_str!("../abi/write.rs");
    let commands = write.split_once("pub mod cmd").unwrap().1;
    for (name, number) in constants(commands) {
        assert(format!("IB_USER_VERBS_{name} == {number}"));
    }
    let netlink_source = include_str!("../abi/netlink.rs");
    let attributes = netlink_source.split_once("pub mod attr").unwrap().1;
    for (name, number) in constants(attributes) {
        assert(format!("RDMA_NLDEV_{name} == {number}"));
    }
    for (name, number) in [
        (
            "RDMA_VERBS_IOCTL",
            u64::from(ioctl::RDMA_VERBS_IOCTL as u32),
        ),
        ("IB_USER_VERBS_ABI_VERSION", write::ABI_VERSION.into()),
        (
            "IB_USER_VERBS_CMD_FLAG_EXTENDED",
            write::CMD_FLAG_EXTENDED.into(),
        ),
        ("UVERBS_ATTR_F_MANDATORY", ioctl::ATTR_F_MANDATORY.into()),
        (
            "UVERBS_ATTR_F_VALID_OUTPUT",
            ioctl::ATTR_F_VALID_OUTPUT.into(),
        ),
        ("RDMA_NL_NLDEV", netlink::RDMA_NL_NLDEV.into()),
        ("RDMA_NLDEV_CMD_GET", netlink::NLDEV_CMD_GET.into()),
        ("RDMA_NLDEV_CMD_SYS_GET", netlink::NLDEV_CMD_SYS_GET.into()),
        ("RDMA_NLDEV_CMD_RES_GET", netlink::NLDEV_CMD_RES_GET.into()),
        (
            "RDMA_NLDEV_CMD_RES_QP_GET",
            netlink::NLDEV_CMD_RES_QP_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_RES_CM_ID_GET",
            netlink::NLDEV_CMD_RES_CM_ID_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_RES_CQ_GET",
            netlink::NLDEV_CMD_RES_CQ_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_RES_MR_GET",
            netlink::NLDEV_CMD_RES_MR_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_RES_PD_GET",
            netlink::NLDEV_CMD_RES_PD_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_STAT_GET",
            netlink::NLDEV_CMD_STAT_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_RES_CTX_GET",
            netlink::NLDEV_CMD_RES_CTX_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_RES_SRQ_GET",
            netlink::NLDEV_CMD_RES_SRQ_GET.into(),
        ),
        (
            "RDMA_NLDEV_CMD_GET_CHARDEV",
            netlink::NLDEV_CMD_GET_CHARDEV.into(),
        ),
        ("NETLINK_RDMA", netlink::NETLINK_RDMA as u64),
        (
            "RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, 15)",
            netlink::nldev_type(15).into(),
        ),
        ("IB_UVERBS_QPT_XRC_TGT", crate::QpType::XRC_TGT.0.into()),
        ("IB_UVERBS_QPT_DRIVER", crate::QpType::DRIVER.0.into()),
        (
            "IB_UVERBS_QP_CREATE_PCI_WRITE_END_PADDING",
            crate::QpCreateFlags::PCI_WRITE_END_PADDING.bits().into(),
        ),
        ("IB_UVERBS_QP_CREATE_SQ_SIG_ALL", 1 << 12),
        (
            "IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN",
            crate::CqFlags::IGNORE_OVERRUN.bits().into(),
        ),
        (
            "IB_UVERBS_ACCESS_HUGETLB",
            crate::AccessFlags::HUGETLB.bits().into(),
        ),
        (
            "IB_UVERBS_ACCESS_RELAXED_ORDERING",
            crate::AccessFlags::RELAXED_ORDERING.bits().into(),
        ),
        ("IB_UVERBS_SRQT_TM", 2),
        (
            "IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT",
            crate::Advice::PREFETCH_NO_FAULT.0.into(),
        ),
        (
            "IB_UVERBS_ADVISE_MR_FLAG_FLUSH",
            crate::AdviseFlags::FLUSH.bits().into(),
        ),
        (
            "IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS",
            verbs::CORE_SUPPORT_OPTIONAL_MR_ACCESS,
        ),
        (
            "IB_UVERBS_QPF_GRH_REQUIRED",
            verbs::QUERY_PORT_GRH_REQUIRED.into(),
        ),
        ("RDMA_DRIVER_RXE", crate::discovery::DriverId::RXE.0.into()),
        ("RDMA_DRIVER_SIW", crate::discovery::DriverId::SIW.0.into()),
        (
            "RDMA_NODE_UNSPECIFIED",
            crate::discovery::NodeType::UNSPECIFIED.0.into(),
        ),
    ] {
        assert(format!("{name} == {number}"));
    }
    (c, count)
}

#[test]
fn the_c_headers_agree() {
    if !are_installed("#include <rdma/ib_user_verbs.h>\n", "linux-libc-dev") {
        return;
    }
    let (c, count) = assertions();
    assert!(count > 700, "only {count} assertions");
    if let Some(Err(complaints)) = compile(&c) {
        panic!("{complaints}");
    }
    // A wrong assertion must fail to compile.
    let (name, size, _) = structures()[0];
    let wrong = c.replace(
        &format!("sizeof(struct {name}) == {size}"),
        &format!("sizeof(struct {name}) == 1"),
    );
    assert!(matches!(compile(&wrong), Some(Err(_))));
}
