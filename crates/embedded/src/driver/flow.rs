//! Flow steering: rules that direct received frames to raw packet queue pairs or drop them, and
//! count them or change their headers. All rules are in one flow table of the device; the first
//! rule that a frame matches applies.

use std::collections::BTreeSet;
use std::os::fd::RawFd;

use roce::bits::{Field, put_bytes};
use softhca::command::opcode as op;
use softhca::layout::{flow, fte_match_set_lyr_2_4 as headers};
use softhca::rule::Rule;
use uverbs::abi::ids::{ATTR_CORE_IN, OBJECT_FLOW};
use uverbs::abi::write::{CreateFlow, CreateFlowResp, DestroyFlow};
use zerocopy::FromBytes;

use crate::driver::cause::{
    Class, Result, at_most, invalid, is, refuse, require, reserved, unsupported,
};
use crate::driver::command::{Input, make, run};
use crate::driver::counters::Description;
use crate::driver::data::{Actions, Destination, Flow, FlowRule, HeaderChange, Headers, Match};
use crate::driver::object::{Object, ObjectData, Summary};
use crate::driver::request::{Request, word};
use crate::driver::state::State;

/// Maximum number of specifications, the same in all kernels.
const MAX_SPECS: u8 = 10;
/// Maximum number of rules of one priority.
const PER_PRIORITY: u32 = 1 << 16;
/// The last priority; it and the one before are those of flows for all frames.
pub(crate) const LAST_PRIORITY: u32 = PER_PRIORITY - 1;

/// `enum ib_flow_attr_type`.
const MATCHING: u32 = 0;
const ALL: u32 = 1;
const ALL_MULTICAST: u32 = 2;
/// `enum ib_flow_spec_type`.
const ETHERNET: u32 = 0x20;
const IPV4: u32 = 0x30;
const IPV6: u32 = 0x31;
const TCP: u32 = 0x40;
const UDP: u32 = 0x41;
/// Specifications from this one on are actions.
const TAG: u32 = 0x1000;
const DISCARD: u32 = 0x1001;
const FLOW_ACTION: u32 = 0x1002;
const COUNT: u32 = 0x1003;
/// Tags have 24 bits.
pub(crate) const MAX_TAG: u32 = (1 << 24) - 1;

/// Bit of [`flow::MATCH_CRITERIA_ENABLE`].
pub(crate) const OUTER_HEADERS: u32 = 1;
const GROUP_LENGTH: usize = flow::MATCH_CRITERIA + 0x200;

// Fields of the headers that rules match.

impl Default for Headers {
    fn default() -> Self {
        Self([0; 64])
    }
}

impl Match {
    /// Sets bytes of a header.
    fn bytes(&mut self, at: usize, mask: &[u8], value: &[u8]) {
        put_bytes(&mut self.mask.0, at, mask);
        put_bytes(&mut self.value.0, at, value);
    }

    fn field(&mut self, field: Field, mask: u32, value: u32) {
        field.put(&mut self.mask.0, mask);
        field.put(&mut self.value.0, value);
    }

    /// Adds a specification: values and mask of its fields.
    ///
    /// # Errors
    /// EINVAL for unknown fields and wrong lengths; EOPNOTSUPP for others.
    fn add(&mut self, kind: u32, parts: &[u8]) -> Result<()> {
        let (value, mask) = parts.split_at(parts.len() / 2);
        let length = match kind {
            ETHERNET => 16,
            IPV4 => 12,
            IPV6 => 40,
            TCP | UDP => 4,
            _ => return unsupported("type of a specification", kind, Rule::Supported),
        };
        require(
            !mask.is_empty(),
            "length of the mask",
            mask.len(),
            Rule::NonZero,
        )?;
        is("length of the value", value.len() as u64, mask.len() as u64)?;
        // As in Linux: fields that the program does not know are not matched, and those that
        // the device does not know must not be.
        let known = length.min(mask.len());
        let is_known = mask[known..].iter().all(|byte| *byte == 0);
        require(
            is_known,
            "length of the mask",
            mask.len(),
            Rule::AtMost(length as u64),
        )?;
        let fields = |part: &[u8]| {
            let mut fields = [0; 40];
            fields[..known].copy_from_slice(&part[..known]);
            fields
        };
        let (value, mask) = (fields(value), fields(mask));
        match kind {
            ETHERNET => {
                self.bytes(headers::DMAC, &mask[..6], &value[..6]);
                self.bytes(headers::SMAC, &mask[6..12], &value[6..12]);
                self.bytes(headers::ETHERTYPE, &mask[12..14], &value[12..14]);
                self.bytes(headers::FIRST_VLAN, &mask[14..16], &value[14..16]);
                if mask[14..16] != [0; 2] {
                    self.field(headers::CVLAN_TAG, 1, 1);
                }
            }
            IPV4 => {
                self.field(headers::IP_VERSION, headers::IP_VERSION.largest(), 4);
                self.bytes(headers::SRC_IPV4, &mask[..4], &value[..4]);
                self.bytes(headers::DST_IPV4, &mask[4..8], &value[4..8]);
                self.field(headers::IP_PROTOCOL, mask[8].into(), value[8].into());
                self.field(headers::TRAFFIC_CLASS, mask[9].into(), value[9].into());
                self.field(headers::TTL_HOPLIMIT, mask[10].into(), value[10].into());
                // Matching fragments is not supported.
                reserved("mask of flags", mask[11])?;
            }
            IPV6 => {
                self.field(headers::IP_VERSION, headers::IP_VERSION.largest(), 6);
                self.bytes(headers::SRC_IPV6, &mask[..16], &value[..16]);
                self.bytes(headers::DST_IPV6, &mask[16..32], &value[16..32]);
                self.field(headers::IP_PROTOCOL, mask[36].into(), value[36].into());
                self.field(headers::TRAFFIC_CLASS, mask[37].into(), value[37].into());
                self.field(headers::TTL_HOPLIMIT, mask[38].into(), value[38].into());
                // Matching flow labels is not supported.
                reserved("mask of flow_label", word(&mask, 32))?;
                reserved("mask of reserved", mask[39])?;
            }
            // The specification begins with the destination port.
            _ => {
                let (at, protocol) = match kind {
                    TCP => (headers::TCP_SPORT, libc::IPPROTO_TCP),
                    _ => (headers::UDP_SPORT, libc::IPPROTO_UDP),
                };
                self.bytes(at + 2, &mask[..2], &value[..2]);
                self.bytes(at, &mask[2..4], &value[2..4]);
                self.field(
                    headers::IP_PROTOCOL,
                    headers::IP_PROTOCOL.largest(),
                    protocol as u32,
                );
            }
        }
        Ok(())
    }
}

/// The specifications of a flow.
#[derive(Clone, Copy, Debug, Default)]
struct Specs {
    what: Match,
    tag: Option<u32>,
    drop: bool,
    /// The handle of a flow action.
    action: Option<u32>,
    /// The handle of counters.
    counters: Option<u32>,
}

impl Specs {
    /// Adds a specification.
    ///
    /// # Errors
    /// EINVAL for unknown ones, wrong lengths, and repeated actions and counters; EOPNOTSUPP
    /// for others.
    fn add(&mut self, kind: u32, parts: &[u8]) -> Result<()> {
        match (kind, parts.len()) {
            (..TAG, _) => self.what.add(kind, parts),
            (TAG, 8) => {
                let tag = word(parts, 0);
                self.tag = Some(tag);
                at_most("tag_id", tag, MAX_TAG.into())
            }
            (DISCARD, 0) => {
                self.drop = true;
                Ok(())
            }
            (FLOW_ACTION, 8) => {
                let is_first = self.action.replace(word(parts, 0)).is_none();
                require(is_first, "action", word(parts, 0), Rule::Once)
            }
            (FLOW_ACTION, length) => unsupported("length of an action", length, Rule::Is(8)),
            (COUNT, 8) => {
                let is_first = self.counters.replace(word(parts, 0)).is_none();
                require(is_first, "counters", word(parts, 0), Rule::Once)
            }
            (TAG | DISCARD | COUNT, length) => {
                invalid("length of a specification", length, Rule::WellFormed)
            }
            _ => invalid("type of a specification", kind, Rule::Known),
        }
    }
}

impl Actions {
    /// Returns whether a flow can share the rule of this one, which has created the rule.
    fn permits(&self, other: &Self) -> bool {
        let drops = |it: &Self| it.destination == Destination::Drop;
        drops(self) == drops(other)
            && self.header_change == other.header_change
            && other.tag.is_none_or(|tag| tag == self.tag.unwrap_or(0))
    }
}

impl ObjectData for Flow {
    fn kind(&self) -> u16 {
        OBJECT_FLOW
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "flow",
            number: 0,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.remove_flow(self)
    }
}

impl State {
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_flow(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let bytes = request.bytes(ATTR_CORE_IN).unwrap_or_default();
        let Ok((requested, rest)) = CreateFlow::read_from_prefix(&bytes) else {
            let least = Rule::AtLeast(size_of::<CreateFlow>() as u64);
            return refuse(Class::NoSpace, "length of the input", bytes.len(), least);
        };
        let attr = requested.flow_attr;
        is("comp_mask", requested.comp_mask, 0)?;
        for byte in attr.reserved {
            is("reserved", byte, 0)?;
        }
        at_most("num_of_specs", attr.num_of_specs, MAX_SPECS.into())?;
        is("port", attr.port, 1)?;
        let Some((mut list, behind)) = rest.split_at_checked(attr.size.into()) else {
            return invalid("size", attr.size, Rule::Within(rest.len() as u64));
        };
        let is_padding = behind.iter().all(|byte| *byte == 0);
        require(is_padding, "length of the input", bytes.len(), Rule::Zero)?;
        // Flags for rules that do not trap frames, and for egress rules.
        reserved("flags", attr.flags)?;
        let mut specs = Specs::default();
        for _ in 0..attr.num_of_specs {
            let Some((header, after)) = list.split_first_chunk::<8>() else {
                return invalid("bytes of specifications", list.len(), Rule::AtLeast(8));
            };
            let [a, b, c, d, low, high, unused @ ..] = *header;
            let length = usize::from(u16::from_ne_bytes([low, high])).checked_sub(header.len());
            let parts = length.and_then(|length| after.split_at_checked(length));
            for byte in unused {
                is("reserved", byte, 0)?;
            }
            let Some((parts, after)) = parts else {
                let size = u16::from_ne_bytes([low, high]);
                return invalid("size of a specification", size, Rule::WellFormed);
            };
            specs.add(u32::from_ne_bytes([a, b, c, d]), parts)?;
            list = after;
        }
        is("bytes after the specifications", list.len() as u64, 0)?;
        let description = Description::of(request)?;
        let last = LAST_PRIORITY;
        let priority = match attr.kind {
            MATCHING => attr.priority.into(),
            ALL | ALL_MULTICAST => {
                is("num_of_specs", attr.num_of_specs, 0)?;
                if attr.kind == ALL_MULTICAST {
                    specs.what.bytes(headers::DMAC, &[1], &[1]);
                    last - 1
                } else {
                    last
                }
            }
            kind => return unsupported("type", kind, Rule::Supported),
        };
        if attr.kind == MATCHING {
            at_most("priority", priority, u64::from(last) - 2)?;
        }
        let tir = self.tir_of(fd, requested.qp_handle)?;
        let header_change = specs.action.map(|handle| {
            let change = self.objects.typed::<HeaderChange>(fd, handle);
            let change = change.map(|it| it.number);
            change.map_err(|error| error.as_class(Class::Invalid))
        });
        let header_change = header_change.transpose()?;
        let counter = match specs.counters {
            // SAFETY: guaranteed by the caller.
            Some(handle) => Some(unsafe { self.describe_counters(fd, handle, description) }?),
            None => None,
        };
        let actions = Actions {
            destination: match specs.drop {
                true => Destination::Drop,
                false => Destination::Tir(tir),
            },
            tag: specs.tag,
            counter,
            header_change,
        };
        let flow = self.add_flow(priority, specs.what, actions)?;
        let used = [specs.action, specs.counters].into_iter().flatten();
        let flow_handle = self.objects.insert(
            Object::new(fd, flow).using([requested.qp_handle].into_iter().chain(used).collect()),
        );
        request.core_answer(&CreateFlowResp {
            comp_mask: 0,
            flow_handle,
        });
        Ok(())
    }

    pub(crate) fn destroy_flow(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: DestroyFlow = request.core()?;
        is("comp_mask", requested.comp_mask, 0)?;
        self.destroy(fd, requested.flow_handle, OBJECT_FLOW)
            .map(drop)
    }

    /// Returns the TIR of a raw packet queue pair.
    pub(crate) fn tir_of(&self, fd: RawFd, qp: u32) -> Result<u32> {
        let tir = self
            .objects
            .qp(fd, qp)?
            .packet
            .and_then(|packet| packet.tir);
        match tir {
            Some(tir) => Ok(tir),
            None => invalid(
                "handle",
                qp,
                Rule::OfType("queue pair of raw packets with receives"),
            ),
        }
    }

    /// Adds a flow to the rule with the same match and priority, or creates a rule.
    ///
    /// # Errors
    /// EEXIST for actions that contradict those of the rule; ENOSPC.
    pub(crate) fn add_flow(
        &mut self,
        priority: u32,
        what: Match,
        actions: Actions,
    ) -> Result<Flow> {
        let first = priority * PER_PRIORITY;
        let last = first + (PER_PRIORITY - 1);
        let mut rules = self.flows.rules.range(first..=last);
        if let Some((index, rule)) = rules.find(|(_, rule)| rule.what == what) {
            if !rule.first.permits(&actions) {
                return refuse(Class::Conflict, "rule", *index, Rule::Free);
            }
            let index = *index;
            self.set_actions(index, |all| all.push(actions))?;
            return Ok(Flow { index, actions });
        }
        let free = (first..=last).find(|index| !self.flows.rules.contains_key(index));
        let Some(index) = free else {
            let most = Rule::AtMost(PER_PRIORITY.into());
            return refuse(
                Class::NoSpace,
                "rules of the priority",
                PER_PRIORITY + 1,
                most,
            );
        };
        let table = self.flow_table()?;
        let input = Input::new(op::CREATE_FLOW_GROUP, GROUP_LENGTH)
            .set(flow::TABLE_ID, table)
            .set(flow::MATCH_CRITERIA_ENABLE, OUTER_HEADERS)
            .bytes(flow::MATCH_CRITERIA, &what.mask.0);
        let group = make(&mut self.hca, &input)?;
        let rule = FlowRule {
            group,
            what,
            first: actions,
            actions: Vec::new(),
        };
        self.flows.rules.insert(index, rule);
        let set = self.set_actions(index, |all| all.push(actions));
        if set.is_err() {
            self.remove_rule(index)?;
        }
        set.map(|()| Flow { index, actions })
    }

    /// Removes a flow; the last flow of a rule removes the rule.
    pub(crate) fn remove_flow(&mut self, flow: &Flow) -> Result<()> {
        self.set_actions(flow.index, |all| {
            if let Some(at) = all.iter().position(|actions| *actions == flow.actions) {
                all.swap_remove(at);
            }
        })?;
        let rule = self.flows.rules.get(&flow.index);
        match rule.is_some_and(|rule| rule.actions.is_empty()) {
            true => self.remove_rule(flow.index),
            false => Ok(()),
        }
    }

    /// Returns the flow table, which is created for the first rule.
    fn flow_table(&mut self) -> Result<u32> {
        if let Some(table) = self.flows.table {
            return Ok(table);
        }
        let table = make(&mut self.hca, &Input::new(op::CREATE_FLOW_TABLE, 0x40))?;
        let input = Input::new(op::SET_FLOW_TABLE_ROOT, 0x40).set(flow::TABLE_ID, table);
        run(&mut self.hca, &input, 16)?;
        self.flows.table = Some(table);
        Ok(table)
    }

    /// Changes the actions of a rule. The device's rule is left unchanged if none remain.
    fn set_actions(&mut self, index: u32, change: impl FnOnce(&mut Vec<Actions>)) -> Result<()> {
        let (Some(table), Some(rule)) = (self.flows.table, self.flows.rules.get_mut(&index)) else {
            return invalid("rule", index, Rule::Exists);
        };
        let mut actions = rule.actions.clone();
        change(&mut actions);
        if !actions.is_empty() {
            // Each TIR receives a frame once, and each counter counts it once.
            let tirs = sorted(actions.iter().filter_map(|it| match it.destination {
                Destination::Tir(tir) => Some(tir),
                Destination::Drop | Destination::Kernel => None,
            }));
            let counters = sorted(actions.iter().filter_map(|it| it.counter));
            let mut action = match rule.first.destination {
                Destination::Drop => flow::action::DROP,
                Destination::Kernel | Destination::Tir(_) => flow::action::FWD_DEST,
            };
            if !counters.is_empty() {
                action |= flow::action::COUNT;
            }
            if rule.first.header_change.is_some() {
                action |= flow::action::MOD_HDR;
            }
            let entries = tirs.iter().map(|tir| flow::destination::TIR << 24 | tir);
            let entries = entries.chain(counters.iter().copied());
            let length = flow::DESTINATION + 8 * (tirs.len() + counters.len());
            let mut input = Input::new(op::SET_FLOW_TABLE_ENTRY, length)
                .set(flow::TABLE_ID, table)
                .set(flow::FLOW_INDEX, index)
                .set(flow::FTE_GROUP_ID, rule.group)
                .set(flow::FLOW_TAG, rule.first.tag.unwrap_or(0))
                .set(flow::ACTION, action)
                .set(flow::DESTINATION_LIST_SIZE, tirs.len() as u32)
                .set(flow::FLOW_COUNTER_LIST_SIZE, counters.len() as u32)
                .set(
                    flow::MODIFY_HEADER_ID,
                    rule.first.header_change.unwrap_or(0),
                )
                .bytes(flow::MATCH_VALUE, &rule.what.value.0);
            for (number, entry) in entries.enumerate() {
                input = input.bytes(flow::DESTINATION + 8 * number, &entry.to_be_bytes());
            }
            run(&mut self.hca, &input, 16)?;
        }
        rule.actions = actions;
        Ok(())
    }

    fn remove_rule(&mut self, index: u32) -> Result<()> {
        let (Some(table), Some(rule)) = (self.flows.table, self.flows.rules.remove(&index)) else {
            return Ok(());
        };
        let input = Input::new(op::DELETE_FLOW_TABLE_ENTRY, 0x40)
            .set(flow::TABLE_ID, table)
            .set(flow::FLOW_INDEX, index);
        // Fails if the entry was never set.
        let _ = run(&mut self.hca, &input, 16);
        let input = Input::new(op::DESTROY_FLOW_GROUP, 0x40)
            .set(flow::TABLE_ID, table)
            .set(flow::GROUP_ID, rule.group);
        run(&mut self.hca, &input, 16).map(drop)
    }
}

/// Returns numbers without duplicates.
fn sorted(numbers: impl Iterator<Item = u32>) -> Vec<u32> {
    numbers.collect::<BTreeSet<u32>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specifications_are_checked_and_converted() {
        let mut what = Match::default();
        let mut ethernet = [0; 32];
        ethernet[..6].copy_from_slice(&[2, 0, 0, 0, 0, 7]);
        ethernet[16..22].fill(0xff);
        what.add(ETHERNET, &ethernet).unwrap();
        assert_eq!(what.mask.0[8..14], [0xff; 6]);
        assert_eq!(what.value.0[8..14], [2, 0, 0, 0, 0, 7]);
        assert_eq!(what.mask.0[14..], [0; 50]);
        what.add(UDP, &[0, 9, 0, 7, 0xff, 0xff, 0xff, 0xff])
            .unwrap();
        assert_eq!(what.value.0[0x1c..0x20], [0, 7, 0, 9], "source port first");
        assert_eq!(what.value.0[0x10], 17);
        let errno =
            |kind, parts: &[u8]| Match::default().add(kind, parts).unwrap_err().errno().raw();
        assert_eq!(errno(ETHERNET, &ethernet[1..]), libc::EINVAL);
        assert_eq!(errno(TCP, &[]), libc::EINVAL);
        let mut longer = [0; 10];
        longer[4] = 1;
        Match::default().add(TCP, &longer).unwrap();
        longer[9] = 1;
        assert_eq!(errno(TCP, &longer), libc::EINVAL, "an unknown field");
        assert_eq!(errno(0x32, &[0; 80]), libc::EOPNOTSUPP);
        let mut ipv6 = [0; 80];
        (ipv6[15], ipv6[36], ipv6[55], ipv6[76]) = (1, 6, 0xff, 0xff);
        what.add(IPV6, &ipv6).unwrap();
        assert_eq!((what.value.0[0x2f], what.mask.0[0x2f]), (1, 0xff));
        assert_eq!((what.value.0[0x10], what.value.0[0x12]), (6, 6 << 1));
        ipv6[72] = 1;
        assert_eq!(errno(IPV6, &ipv6), libc::EOPNOTSUPP, "a flow label");
        let mut ipv4 = [0; 24];
        Match::default().add(IPV4, &ipv4).unwrap();
        ipv4[23] = 1;
        assert_eq!(errno(IPV4, &ipv4), libc::EOPNOTSUPP);
        // The addresses alone, as of `IBV_FLOW_SPEC_IPV4`.
        let mut addresses = Match::default();
        let parts = [0, 0, 0, 0, 10, 0, 0, 1, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        addresses.add(IPV4, &parts).unwrap();
        let mut whole = Match::default();
        let (value, mask) = parts.split_at(8);
        let parts = [value, &[0; 4], mask, &[0; 4]].concat();
        whole.add(IPV4, &parts).unwrap();
        assert_eq!(addresses, whole);
        assert_eq!(whole.value.0[0x3c..], [10, 0, 0, 1]);
    }
}
