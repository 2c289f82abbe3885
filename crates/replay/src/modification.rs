//! `ibv_modify_qp` as a record has it.

use ringverbs::qp::{QpAttr, QpAttrMask, State};
use ringverbs::{AccessFlags, AhAttr, LocalAddress};
use serde_json::Value;

use crate::record::Arguments;

/// Attributes of a queue pair, and which of them a call sets.
pub(crate) struct Modification {
    pub(crate) attributes: QpAttr,
    pub(crate) mask: QpAttrMask,
}

/// Returns access rights of a list of names; `None` if one is unknown.
pub(crate) fn access(list: Option<&Value>) -> Option<AccessFlags> {
    let mut access = AccessFlags::empty();
    for name in list?.as_array()? {
        access |= match name.as_str()? {
            "LOCAL_WRITE" => AccessFlags::LOCAL_WRITE,
            "REMOTE_WRITE" => AccessFlags::REMOTE_WRITE,
            "REMOTE_READ" => AccessFlags::REMOTE_READ,
            "REMOTE_ATOMIC" => AccessFlags::REMOTE_ATOMIC,
            "MW_BIND" => AccessFlags::MW_BIND,
            "ON_DEMAND" => AccessFlags::ON_DEMAND,
            "RELAXED_ORDERING" => AccessFlags::RELAXED_ORDERING,
            // How its memory is made is not in the record. FLUSH is not replayed, and the
            // device has not its rights, which rdma_cm gives on rdma_rxe.
            "HUGETLB" | "FLUSH_GLOBAL" | "FLUSH_PERSISTENT" => AccessFlags::empty(),
            _ => return None,
        };
    }
    Some(access)
}

fn state(name: &str) -> Option<State> {
    Some(match name {
        "RESET" => State::RESET,
        "INIT" => State::INIT,
        "RTR" => State::RTR,
        "RTS" => State::RTS,
        "SQD" => State::SQD,
        "SQE" => State::SQE,
        "ERR" => State::ERR,
        _ => return None,
    })
}

/// Returns a path from a port of this device to itself, with the recorded properties.
fn path(recorded: &Value, local: &LocalAddress) -> AhAttr {
    let number = |name: &str| recorded[name].as_u64().unwrap_or_default();
    let mut path = local.path_to(local.gid, local.lid);
    path.sl = number("sl") as u8;
    // Ethernet ports have no other path.
    path.is_global = local.lid == 0 || number("is_global") != 0;
    if number("is_global") != 0 {
        path.grh.hop_limit = number("hop_limit") as u8;
        path.grh.traffic_class = number("traffic_class") as u8;
        path.grh.flow_label = number("flow_label") as u32;
    }
    path
}

impl Modification {
    /// Returns the attributes that a call has set; `None` if the record has others. Paths lead to
    /// the device itself, and to the queue pair `peer`.
    pub(crate) fn of(arguments: &Arguments, local: &LocalAddress, peer: u32) -> Option<Self> {
        let mut attributes = QpAttr::default();
        let mut mask = QpAttrMask::empty();
        for (name, value) in arguments.iter() {
            let number = value.as_u64();
            let byte = || number.and_then(|number| u8::try_from(number).ok());
            let word = || number.and_then(|number| u32::try_from(number).ok());
            mask |= match name {
                "qp_state" => {
                    attributes.qp_state = state(value.as_str()?)?;
                    QpAttrMask::STATE
                }
                "cur_qp_state" => {
                    attributes.cur_qp_state = state(value.as_str()?)?;
                    QpAttrMask::CUR_STATE
                }
                "qp_access_flags" => {
                    attributes.qp_access_flags = access(Some(value))?;
                    QpAttrMask::ACCESS_FLAGS
                }
                "pkey_index" => {
                    attributes.pkey_index = u16::try_from(number?).ok()?;
                    QpAttrMask::PKEY_INDEX
                }
                "port_num" => {
                    attributes.port_num = local.port;
                    QpAttrMask::PORT
                }
                "qkey" => {
                    attributes.qkey = word()?;
                    QpAttrMask::QKEY
                }
                "ah_attr" => {
                    attributes.ah_attr = path(value, local);
                    QpAttrMask::AV
                }
                "path_mtu" => {
                    // `enum ibv_mtu` begins with 256 bytes.
                    attributes.path_mtu = (word()?.checked_ilog2()? as u8).checked_sub(7)?;
                    QpAttrMask::PATH_MTU
                }
                "dest_qp_num" => {
                    attributes.dest_qp_num = peer;
                    QpAttrMask::DEST_QPN
                }
                "rq_psn" => {
                    attributes.rq_psn = word()?;
                    QpAttrMask::RQ_PSN
                }
                "sq_psn" => {
                    attributes.sq_psn = word()?;
                    QpAttrMask::SQ_PSN
                }
                "timeout" => {
                    attributes.timeout = byte()?;
                    QpAttrMask::TIMEOUT
                }
                "retry_cnt" => {
                    attributes.retry_cnt = byte()?;
                    QpAttrMask::RETRY_CNT
                }
                "rnr_retry" => {
                    attributes.rnr_retry = byte()?;
                    QpAttrMask::RNR_RETRY
                }
                "min_rnr_timer" => {
                    attributes.min_rnr_timer = byte()?;
                    QpAttrMask::MIN_RNR_TIMER
                }
                "max_rd_atomic" => {
                    attributes.max_rd_atomic = byte()?;
                    QpAttrMask::MAX_QP_RD_ATOMIC
                }
                "max_dest_rd_atomic" => {
                    attributes.max_dest_rd_atomic = byte()?;
                    QpAttrMask::MAX_DEST_RD_ATOMIC
                }
                "en_sqd_async_notify" => {
                    attributes.en_sqd_async_notify = number? != 0;
                    QpAttrMask::EN_SQD_ASYNC_NOTIFY
                }
                "path_mig_state" => {
                    attributes.path_mig_state = byte()?;
                    QpAttrMask::PATH_MIG_STATE
                }
                _ => return None,
            };
        }
        Some(Self { attributes, mask })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_that_only_other_devices_have_are_left_away() {
        let list = |names: &str| access(Some(&serde_json::from_str(names).unwrap()));
        let given = list(r#"["REMOTE_WRITE","FLUSH_GLOBAL","FLUSH_PERSISTENT"]"#);
        assert_eq!(given, Some(AccessFlags::REMOTE_WRITE));
        assert_eq!(list(r#"["ZERO_BASED"]"#), None);
        assert_eq!(list("[3]"), None);
    }
}
