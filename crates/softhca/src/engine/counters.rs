//! Counters.

use roce::transport::Operation;

/// A counter set that queue pairs are assigned to. All counters wrap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QCounters {
    pub rx_write_requests: u32,
    pub rx_read_requests: u32,
    pub rx_atomic_requests: u32,
    pub out_of_buffer: u32,
    pub out_of_sequence: u32,
    pub duplicate_request: u32,
    pub rnr_nak_retry_err: u32,
    pub packet_seq_err: u32,
    pub implied_nak_seq_err: u32,
    pub local_ack_timeout_err: u32,
    pub transport_retries_exceeded: u32,
    pub resp_local_length_error: u32,
    pub req_local_length_error: u32,
    pub resp_cqe_error: u32,
    pub req_cqe_error: u32,
    pub req_remote_invalid_request: u32,
    pub req_remote_access_errors: u32,
    pub resp_remote_access_errors: u32,
    pub req_cqe_flush_error: u32,
    pub resp_cqe_flush_error: u32,
    pub cq_overflow: u32,
}

impl QCounters {
    /// Returns the counters with their offsets in the output of QUERY_Q_COUNTER.
    pub fn fields(&self) -> [(usize, u32); 21] {
        [
            (0x10, self.rx_write_requests),
            (0x18, self.rx_read_requests),
            (0x20, self.rx_atomic_requests),
            (0x30, self.out_of_buffer),
            (0x38, self.out_of_sequence),
            (0x40, self.duplicate_request),
            (0x48, self.rnr_nak_retry_err),
            (0x50, self.packet_seq_err),
            (0x58, self.implied_nak_seq_err),
            (0x60, self.local_ack_timeout_err),
            (0x78, self.resp_local_length_error),
            (0x7c, self.req_local_length_error),
            (0x90, self.resp_cqe_error),
            (0x94, self.req_cqe_error),
            (0xa0, self.req_remote_invalid_request),
            (0xa8, self.req_remote_access_errors),
            (0xac, self.resp_remote_access_errors),
            (0xb4, self.transport_retries_exceeded),
            (0xb8, self.cq_overflow),
            (0xbc, self.resp_cqe_flush_error),
            (0xc0, self.req_cqe_flush_error),
        ]
    }
}

/// Further counters of the HCA; `softhca stat` shows them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Stats {
    pub commands: u64,
    pub commands_refused: u64,
    pub doorbells: u64,
    pub blue_flames: u64,
    pub arms: u64,
    pub cqes: u64,
    pub cqes_with_error: u64,
    pub cqes_inline: u64,
    pub cqes_compressed: u64,
    /// Page fault events posted to the driver.
    pub page_faults: u64,
    /// Receives returned because of an injected fault.
    pub receives_returned: u64,
    pub eqes: u64,
    pub interrupts: u64,
    pub send_requests: u64,
    /// Send requests with inline data.
    pub sends_inline: u64,
    pub receive_requests: u64,
    /// Bytes read from memory, again for packets that are sent again.
    pub bytes_gathered: u64,
    pub bytes_scattered: u64,
    /// Bytes of sends and writes that have succeeded, and of peers' reads.
    pub bytes_delivered: u64,
    /// Packets of remote writes and atomics that were carried out.
    pub remote_writes: u64,
    pub ethernet_sent: u64,
    pub ethernet_received: u64,
    pub ethernet_dropped: u64,
    /// Times that the port's link went down.
    pub link_downed: u64,
    pub complaints: u64,
}

impl Stats {
    /// Returns all counters with their names.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        macro_rules! list {
            ($($name:ident),*) => { vec![$((stringify!($name), self.$name)),*] };
        }
        list!(
            commands,
            commands_refused,
            doorbells,
            blue_flames,
            arms,
            cqes,
            cqes_with_error,
            cqes_inline,
            cqes_compressed,
            page_faults,
            receives_returned,
            eqes,
            interrupts,
            send_requests,
            sends_inline,
            receive_requests,
            bytes_gathered,
            bytes_scattered,
            bytes_delivered,
            remote_writes,
            ethernet_sent,
            ethernet_received,
            ethernet_dropped,
            link_downed,
            complaints
        )
    }
}

/// Work requests and bytes of send queues by operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OperationCounts(Vec<(&'static str, u64, u64)>);

impl OperationCounts {
    pub(crate) fn count(&mut self, operation: &Operation, length: u32) {
        let length = match operation {
            Operation::FetchAdd { .. } | Operation::CompareSwap { .. } => 8,
            Operation::Local => 0,
            _ => u64::from(length),
        };
        let name = operation.name();
        match self.0.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, requests, bytes)) => {
                *requests += 1;
                *bytes += length;
            }
            None => self.0.push((name, 1, length)),
        }
    }

    /// Returns the name of each operation, the number of its work requests, and their bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        self.0.iter().copied()
    }
}
