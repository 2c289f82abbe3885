//! Memory behind keys with signatures or encryption ([`super::protection`]).
//!
//! Peers address such a key by offsets on the wire; lists of work requests are converted to
//! such offsets when they are fetched. A block is converted as a whole; a block that
//! arrives in parts is kept until it is complete.

use std::sync::Arc;

use roce::transport::Fault;

use super::core::Core;
use super::cq::{self, Completion};
use super::mkey::{Accessor, Location, Mkey, Rights};
use super::protection::{Protection, SignatureError};
use super::wqe::LocalBuffers;
use crate::platform::Platform;

/// Maximum number of incomplete blocks. Beyond it, all are dropped.
const MAX_PARTIAL_BLOCKS: usize = 1024;

/// The state of a signature (protection signature value).
#[derive(Debug)]
pub(crate) struct Psv {
    pub(crate) pd: u32,
    /// The PSV was set, and no error has been reported since.
    pub(crate) ready: bool,
}

/// A block of which a part has arrived.
#[derive(Debug)]
pub(crate) struct PartialBlock {
    bytes: Vec<u8>,
    arrived: Vec<bool>,
}

/// The queue pair that accesses memory; its completion queue receives signature errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccessingQp {
    pub(crate) qpn: u32,
    /// The queue pair is the requester of the access; otherwise the responder.
    pub(crate) is_requester: bool,
}

/// A key with protection.
#[derive(Debug, Clone)]
struct ProtectedKey {
    key: u32,
    start: u64,
    /// Bytes in memory.
    length: u64,
    protection: Arc<Protection>,
}

/// A part of a block on the wire.
#[derive(Debug, Clone, Copy)]
struct BlockRange {
    block: u64,
    /// The range in the block.
    from: usize,
    to: usize,
    /// Offset in the access.
    at: usize,
    /// The block is complete in memory, with its signature.
    is_complete: bool,
}

impl ProtectedKey {
    fn from_mkey(key: u32, mkey: &Mkey) -> Option<ProtectedKey> {
        Some(ProtectedKey {
            key,
            start: mkey.start,
            length: mkey.length,
            protection: mkey.protection.clone()?,
        })
    }

    /// Returns start and end of a range as offsets on the wire.
    fn range(&self, va: u64, length: u64) -> Result<(u64, u64), Fault> {
        let first = va.wrapping_sub(self.start);
        let end = first.checked_add(length).ok_or(Fault::Protection)?;
        let end = (end <= self.protection.memory_to_wire(self.length)).then_some(end);
        Ok((first, end.ok_or(Fault::Protection)?))
    }

    /// Divides the range of a packet on the wire into ranges of blocks.
    fn block_ranges(&self, va: u64, length: usize) -> Result<Vec<BlockRange>, Fault> {
        let (first, end) = self.range(va, length as u64)?;
        let size = self.protection.wire_bytes() as u64;
        let whole = self.length / self.protection.memory_bytes() as u64;
        let mut block_ranges = Vec::new();
        let mut at = first;
        while at < end {
            let block = at / size;
            let from = at % size;
            let to = size.min(from + (end - at));
            block_ranges.push(BlockRange {
                block,
                from: from as usize,
                to: to as usize,
                at: (at - first) as usize,
                is_complete: block < whole,
            });
            at += to - from;
        }
        Ok(block_ranges)
    }

    /// The address of a block in memory.
    fn address(&self, block: u64) -> u64 {
        let offset = block.wrapping_mul(self.protection.memory_bytes() as u64);
        self.start.wrapping_add(offset)
    }
}

impl BlockRange {
    /// Returns its range in the access.
    fn range(&self) -> std::ops::Range<usize> {
        self.at..self.at + (self.to - self.from)
    }
}

impl<P: Platform> Core<P> {
    /// Returns the address of a key's memory if it is contiguous and without protection.
    pub(crate) fn contiguous_address(
        &self,
        accessor: Accessor,
        key: u32,
        va: u64,
        length: usize,
        rights: Rights,
    ) -> Option<u64> {
        if self.protected(key).is_some() {
            return None;
        }
        let mut address = None;
        let mut record_address = |location, _, n| match location {
            Location::Guest(at) if n == length as u64 => {
                address = Some(at);
                Ok(())
            }
            _ => Err(Fault::Memory),
        };
        let result = self.translate(
            accessor,
            key,
            va,
            length as u64,
            rights,
            &mut record_address,
        );
        address.filter(|_| result.is_ok())
    }

    /// Returns whether data are converted or checked on their way through a key.
    pub(super) fn is_protected(&self, key: u32) -> bool {
        self.protected(key).is_some()
    }

    /// The key, if it has protection.
    fn protected(&self, key: u32) -> Option<ProtectedKey> {
        if self.protected_keys == 0 {
            return None;
        }
        ProtectedKey::from_mkey(key, self.mkeys.get(key >> 8)?)
    }

    /// Returns the start of a key with protection, and its lengths in memory and on the wire;
    /// `None` for a key without protection.
    pub(crate) fn protected_range(&self, key: u32) -> Option<(u64, [u64; 2])> {
        let key = self.protected(key)?;
        let on_wire = key.protection.memory_to_wire(key.length);
        Some((key.start, [key.length, on_wire]))
    }

    /// Converts the list of a fetched work request to offsets on the wire. Returns the
    /// length of its message.
    pub(crate) fn convert_list(&mut self, local: &mut LocalBuffers, length: u32) -> u32 {
        if self.protected_keys == 0 {
            return length;
        }
        let mut converted = u64::from(length);
        for segment in local.segments.iter_mut() {
            let Some(ProtectedKey {
                start, protection, ..
            }) = self.protected(segment.key)
            else {
                continue;
            };
            let first = segment.va.wrapping_sub(start);
            let end = first.saturating_add(segment.length.into());
            let [first, end] = [first, end].map(|at| protection.local_to_wire(at));
            let on_wire = u32::try_from(end.saturating_sub(first)).unwrap_or(u32::MAX);
            converted = (converted + u64::from(on_wire)).saturating_sub(segment.length.into());
            segment.va = start.wrapping_add(first);
            segment.length = on_wire;
            // Data scattered into the CQE would not have the memory format.
            local.cqe_scatter = None;
        }
        u32::try_from(converted).unwrap_or(u32::MAX)
    }

    /// Checks a range of a remote access. `None` for a key without protection.
    pub(crate) fn check_protected(
        &self,
        accessor: Accessor,
        key: u32,
        va: u64,
        length: u32,
        rights: Rights,
    ) -> Option<Result<(), Fault>> {
        let protected = self.protected(key)?;
        Some(
            (self.may_use_key(accessor, key, rights))
                .and_then(|()| protected.range(va, length.into()).map(drop)),
        )
    }

    /// As [`Core::read_key`], in the wire format.
    pub(crate) fn read_in_wire_format(
        &mut self,
        accessing_qp: AccessingQp,
        accessor: Accessor,
        key: u32,
        va: u64,
        out: &mut [u8],
        rights: Rights,
    ) -> Result<(), Fault> {
        let Some(protected) = self.protected(key) else {
            return self.read_key(accessor, key, va, out, rights);
        };
        let protection = Arc::clone(&protected.protection);
        for range in protected.block_ranges(va, out.len())? {
            let address = protected.address(range.block);
            let out = &mut out[range.range()];
            if !range.is_complete {
                self.read_key(
                    accessor,
                    key,
                    address.wrapping_add(range.from as u64),
                    out,
                    rights,
                )?;
                continue;
            }
            let mut block = vec![0; protection.memory_bytes()];
            self.read_key(accessor, key, address, &mut block, rights)?;
            let (sent, error) = protection.encode(range.block, &block);
            out.copy_from_slice(&sent[range.from..range.to]);
            if let (Some(error), true) = (error, range.to == sent.len()) {
                let offset = range.block.wrapping_mul(protection.memory_bytes() as u64);
                let offset = offset.wrapping_add(error.offset as u64);
                self.report_signature_error(accessing_qp, &protected, error, offset);
            }
        }
        Ok(())
    }

    /// As [`Core::write_key`], in the wire format.
    pub(crate) fn write_in_wire_format(
        &mut self,
        accessing_qp: AccessingQp,
        accessor: Accessor,
        key: u32,
        va: u64,
        data: &[u8],
        rights: Rights,
    ) -> Result<(), Fault> {
        let Some(protected) = self.protected(key) else {
            return self.write_key(accessor, key, va, data, rights);
        };
        let protection = Arc::clone(&protected.protection);
        for range in protected.block_ranges(va, data.len())? {
            let address = protected.address(range.block);
            let data = &data[range.range()];
            let size = protection.wire_bytes();
            let end = match range.is_complete {
                true => range.to.min(protection.data_bytes()),
                false => range.to,
            };
            if (!range.is_complete || protection.may_store_incomplete_blocks()) && range.from < end
            {
                let data = &data[..end - range.from];
                self.write_key(
                    accessor,
                    key,
                    address.wrapping_add(range.from as u64),
                    data,
                    rights,
                )?;
            }
            if !range.is_complete {
                continue;
            }
            let block = match range.to - range.from == size {
                true => Some(data.to_vec()),
                false => self.add_to_partial_block(&protected, &range, data),
            };
            let Some(block) = block else { continue };
            let (stored, error) = protection.decode(range.block, &block);
            self.write_key(accessor, key, address, &stored, rights)?;
            if let Some(error) = error {
                let offset = range.block.wrapping_mul(size as u64);
                let offset = offset.wrapping_add(error.offset as u64);
                self.report_signature_error(accessing_qp, &protected, error, offset);
            }
        }
        Ok(())
    }

    /// Adds a part to a block. Returns the block if it is complete.
    fn add_to_partial_block(
        &mut self,
        protected: &ProtectedKey,
        range: &BlockRange,
        data: &[u8],
    ) -> Option<Vec<u8>> {
        let size = protected.protection.wire_bytes();
        if self.partial_blocks.len() >= MAX_PARTIAL_BLOCKS {
            self.partial_blocks.clear();
        }
        let at = (protected.key >> 8, range.block);
        let part = self
            .partial_blocks
            .entry(at)
            .or_insert_with(|| PartialBlock {
                bytes: vec![0; size],
                arrived: vec![false; size],
            });
        part.bytes
            .get_mut(range.from..range.to)?
            .copy_from_slice(data);
        part.arrived.get_mut(range.from..range.to)?.fill(true);
        let is_complete = part.arrived.iter().all(|arrived| *arrived);
        is_complete.then(|| self.partial_blocks.remove(&at).map(|part| part.bytes))?
    }

    /// Reports a signature error. Further ones are not reported until software has rearmed
    /// the key and the PSV.
    fn report_signature_error(
        &mut self,
        accessing_qp: AccessingQp,
        protected: &ProtectedKey,
        error: SignatureError,
        offset: u64,
    ) {
        let psv = protected.protection.psvs[usize::from(!error.of_memory)];
        let psv = psv.and_then(|psv| self.psvs.get_mut(psv));
        let Some(mkey) = self.mkeys.get_mut(protected.key >> 8) else {
            return;
        };
        let next = mkey.signature_errors.wrapping_add(1);
        match psv {
            Some(psv) if psv.ready && next & 1 == mkey.awaited_error => psv.ready = false,
            _ => return,
        }
        mkey.signature_errors = next;
        let Some(qp) = self.qp_mut(accessing_qp.qpn) else {
            return;
        };
        let cqn = match accessing_qp.is_requester {
            true => {
                qp.drain_pending = qp.drains_on_signature_error;
                qp.send_cq
            }
            false => qp.recv_cq,
        };
        let signature = cq::SignatureErrorCqe {
            error,
            key: protected.key,
            offset,
        };
        self.complete(
            cqn,
            &Completion {
                opcode: cq::opcode::SIGNATURE_ERROR,
                signature: Some(&signature),
                ..Completion::default()
            },
        );
    }
}
