//! Positions of fields as mlx5_ifc.h counts them: bits from the beginning of the structure.
//! The driver in `crates/embedded` sets these by the same definitions as the device reads them,
//! so that it would not see a wrong one.

use roce::bits::Field;

use crate::layout::*;

/// Returns the first bit of a field, and the number of its bits.
fn position(field: Field) -> (usize, u32) {
    let mut bytes = [0; 512];
    field.put(&mut bytes, field.largest());
    let first = bytes.iter().position(|byte| *byte != 0).unwrap();
    let bits = bytes.iter().map(|byte| byte.count_ones()).sum();
    (8 * first + bytes[first].leading_zeros() as usize, bits)
}

fn check(structure: &str, fields: &[(Field, usize, u32)]) {
    for (number, (field, at, width)) in fields.iter().enumerate() {
        assert_eq!(position(*field), (*at, *width), "{structure}, {number}");
    }
}

#[test]
fn fields_are_where_mlx5_ifc_has_them() {
    check(
        "cqc",
        &[
            (cqc::CQE_SZ, 0x8, 3),
            (cqc::OI, 0xe, 1),
            (cqc::CQE_COMPRESSION_EN, 0x11, 1),
            (cqc::MINI_CQE_RES_FORMAT, 0x12, 2),
            (cqc::PAGE_OFFSET, 0x54, 6),
            (cqc::LOG_CQ_SIZE, 0x63, 5),
            (cqc::UAR_PAGE, 0x68, 24),
            (cqc::C_EQN, 0xb8, 8),
            (cqc::LOG_PAGE_SIZE, 0xc3, 5),
        ],
    );
    check(
        "qpc",
        &[
            (qpc::LAG_TX_PORT_AFFINITY, 0x4, 4),
            (qpc::OFFLOAD_TYPE, 0x18, 4),
            (qpc::BLOCK_LB_MC, 0x21, 1),
            (qpc::DP_ORDERING_FORCE, 0x27, 1),
            (qpc::NO_SQ, 0x50, 1),
            (qpc::UAR_PAGE, 0x68, 24),
            (qpc::LOG_SRA_MAX, 0x388, 3),
            (qpc::RETRY_COUNT, 0x38d, 3),
            (qpc::RNR_RETRY, 0x390, 3),
            (qpc::LOG_NUM_DCI_STREAM_CHANNELS, 0x3e3, 5),
            (qpc::LOG_NUM_DCI_ERRORED_STREAMS, 0x403, 5),
            (qpc::LOG_RRA_MAX, 0x488, 3),
            (qpc::RRE, 0x490, 1),
            (qpc::RWE, 0x491, 1),
            (qpc::RAE, 0x492, 1),
            (qpc::ACCESS, 0x490, 3),
            (qpc::PAGE_OFFSET, 0x494, 6),
            (qpc::DP_ORDERING_1, 0x49c, 1),
            (qpc::MIN_RNR_NAK, 0x4a3, 5),
            (qpc::XRCD, 0x4c8, 24),
            (qpc::CS_REQ, 0x630, 8),
            (qpc::CS_RES, 0x638, 8),
        ],
    );
    check(
        "ads",
        &[
            (ads::GRH, 0x28, 1),
            (ads::MLID, 0x29, 7),
            (ads::ACK_TIMEOUT, 0x40, 5),
            (ads::SRC_ADDR_INDEX, 0x48, 8),
            (ads::TCLASS, 0x64, 8),
            (ads::FLOW_LABEL, 0x6c, 20),
            (ads::UDP_SPORT, 0x110, 16),
            (ads::SL, 0x124, 4),
            (ads::VHCA_PORT_NUM, 0x128, 8),
        ],
    );
    check(
        "mkc",
        &[
            (mkc::FREE, 0x1, 1),
            (mkc::ACCESS_MODE_4_2, 0x3, 3),
            (mkc::UMR_EN, 0x10, 1),
            (mkc::A, 0x11, 1),
            (mkc::ACCESS, 0x11, 5),
            (mkc::LR, 0x15, 1),
            (mkc::ACCESS_MODE_1_0, 0x16, 2),
            (mkc::QPN, 0x20, 24),
            (mkc::MKEY_7_0, 0x38, 8),
            (mkc::LENGTH64, 0x60, 1),
            (mkc::BSF_EN, 0x61, 1),
            (mkc::EXPECTED_SIGERR_COUNT, 0x65, 1),
            (mkc::EN_RINVAL, 0x67, 1),
            (mkc::PD, 0x68, 24),
            (mkc::TRANSLATIONS_OCTWORD_SIZE, 0x1a0, 32),
        ],
    );
    check(
        "dctc",
        &[
            (dctc::DP_ORDERING_FORCE, 0x27, 1),
            (dctc::USER_INDEX, 0x28, 24),
            (dctc::CQN, 0x48, 24),
            (dctc::RRE, 0x6c, 1),
            (dctc::RWE, 0x6d, 1),
            (dctc::RAE, 0x6e, 1),
            (dctc::RLKY, 0x71, 1),
            (dctc::DP_ORDERING_1, 0x74, 1),
            (dctc::CS_RES, 0x88, 8),
            (dctc::MIN_RNR_NAK, 0x93, 5),
            (dctc::SRQN, 0xa8, 24),
            (dctc::PD, 0xc8, 24),
            (dctc::TCLASS, 0xe0, 8),
            (dctc::FLOW_LABEL, 0xec, 20),
            (dctc::MTU, 0x145, 3),
            (dctc::PORT, 0x148, 8),
            (dctc::PKEY_INDEX, 0x150, 16),
            (dctc::MY_ADDR_INDEX, 0x168, 8),
            (dctc::HOP_LIMIT, 0x178, 8),
        ],
    );
    check(
        "xrc_srqc",
        &[
            (xrc_srqc::LOG_XRC_SRQ_SIZE, 0x4, 4),
            (xrc_srqc::LOG_RQ_STRIDE, 0x25, 3),
            (xrc_srqc::XRCD, 0x28, 24),
            (xrc_srqc::PAGE_OFFSET, 0x40, 6),
            (xrc_srqc::CQN, 0x48, 24),
            (xrc_srqc::LOG_PAGE_SIZE, 0x82, 6),
            (xrc_srqc::USER_INDEX, 0x88, 24),
            (xrc_srqc::PD, 0xc8, 24),
            (xrc_srqc::LWM, 0xe0, 16),
        ],
    );
    check(
        "tirc",
        &[
            (tirc::DISP_TYPE, 0x20, 4),
            (tirc::INLINE_RQN, 0xe8, 24),
            (tirc::INDIRECT_TABLE, 0x108, 24),
            (tirc::RX_HASH_FN, 0x120, 4),
            (tirc::SELF_LB_BLOCK, 0x126, 2),
            (tirc::TRANSPORT_DOMAIN, 0x128, 24),
            (tirc::L3_PROT_TYPE, 0x280, 1),
            (tirc::L4_PROT_TYPE, 0x281, 1),
            (tirc::SELECTED_FIELDS, 0x282, 30),
        ],
    );
}
