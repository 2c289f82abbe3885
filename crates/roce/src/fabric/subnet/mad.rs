//! Management datagrams of the subnet administration class.

use crate::bits::{Field, field, get_array, get64, put_bytes};

/// Bytes of a management datagram.
const MAD_SIZE: usize = 256;
/// Bytes of data (a record, or a part of a table) in a datagram.
const DATA: usize = 200;

const BASE_VERSION: Field = field(0, 31, 24);
const CLASS: Field = field(0, 23, 16);
const CLASS_VERSION: Field = field(0, 15, 8);
const METHOD: Field = field(0, 7, 0);
const STATUS: Field = field(4, 31, 16);
const ATTRIBUTE: Field = field(16, 31, 16);
/// Offset of the RMPP header, for responses of more than one datagram.
const RMPP: usize = 24;
const RMPP_HEADER: usize = 12;
const RMPP_VERSION: Field = field(24, 31, 24);
const RMPP_TYPE: Field = field(24, 23, 16);
const RMPP_RESPONSE_TIME: Field = field(24, 15, 11);
const RMPP_FLAGS: Field = field(24, 10, 8);
const RMPP_SEGMENT: Field = field(28, 31, 0);
const RMPP_LENGTH: Field = field(32, 31, 0);
// SM_Key, before this field, is ignored: there are no trusted requests.
const ATTRIBUTE_OFFSET: Field = field(44, 31, 16);
const COMPONENTS: usize = 48;
const RECORD: usize = 56;
/// Bytes of the subnet administration header, which each segment of a table
/// repeats.
const ADMINISTRATION_HEADER: usize = 20;

const SUBNET_ADMINISTRATION: u32 = 3;
const RESPONSE: u8 = 0x80;

/// Methods.
pub(super) mod method {
    pub const GET: u8 = 0x01;
    pub const SET: u8 = 0x02;
    pub const GET_TABLE: u8 = 0x12;
    pub const GET_TRACE_TABLE: u8 = 0x13;
    pub const GET_MULTI: u8 = 0x14;
    pub const DELETE: u8 = 0x15;
}

/// Attributes.
pub(super) mod attribute {
    pub const CLASS_PORT_INFO: u16 = 0x01;
    pub const SERVICE: u16 = 0x31;
    pub const PATH: u16 = 0x35;
    pub const GROUP_MEMBER: u16 = 0x38;
}

// Status codes: those of all classes, and those of subnet administration.
pub(super) const VERSION_UNSUPPORTED: u16 = 0x0004;
pub(super) const METHOD_UNSUPPORTED: u16 = 0x0008;
pub(super) const ATTRIBUTE_UNSUPPORTED: u16 = 0x000c;
pub(super) const NO_RESOURCES: u16 = 0x0100;
pub(super) const REQUEST_INVALID: u16 = 0x0200;
pub(super) const NO_RECORDS: u16 = 0x0300;
pub(super) const TOO_MANY_RECORDS: u16 = 0x0400;
pub(super) const INVALID_GID: u16 = 0x0500;
pub(super) const INSUFFICIENT_COMPONENTS: u16 = 0x0600;
pub(super) const REQUEST_DENIED: u16 = 0x0700;

/// A management datagram.
#[derive(Clone, Debug)]
pub(super) struct Mad([u8; MAD_SIZE]);

impl Mad {
    /// Reads the datagram in a message; all have the same length.
    pub fn read(message: &[u8]) -> Option<Self> {
        message.try_into().ok().map(Self)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn method(&self) -> u8 {
        METHOD.get(&self.0) as u8
    }

    pub fn attribute(&self) -> u16 {
        ATTRIBUTE.get(&self.0) as u16
    }

    /// Whether the datagram is a request that expects a response.
    pub fn expects_response(&self) -> bool {
        let class = CLASS.get(&self.0) == SUBNET_ADMINISTRATION;
        class
            && matches!(
                self.method(),
                method::GET
                    | method::SET
                    | method::GET_TABLE
                    | method::GET_TRACE_TABLE
                    | method::GET_MULTI
                    | method::DELETE
            )
    }

    /// Whether the base and class versions are the supported ones.
    pub fn has_supported_version(&self) -> bool {
        BASE_VERSION.get(&self.0) == 1 && CLASS_VERSION.get(&self.0) == 2
    }

    /// Whether the mask includes a component of the record.
    pub fn has(&self, component: u32) -> bool {
        get64(&self.0, COMPONENTS) >> component & 1 != 0
    }

    /// A component of 16 bytes, if the mask includes it.
    pub fn gid(&self, component: u32, at: usize) -> Option<[u8; 16]> {
        self.has(component).then(|| get_array(self.record(), at))
    }

    /// A component, if the mask includes it.
    pub fn component(&self, component: u32, field: Field) -> Option<u32> {
        self.has(component).then(|| field.get(self.record()))
    }

    /// The record, including components that the mask excludes.
    pub fn record(&self) -> &[u8] {
        &self.0[RECORD..]
    }

    /// The header of the response.
    fn response_header(&self) -> Self {
        let mut response = self.clone();
        let method = match self.method() {
            // The response to Set is GetResp.
            method::SET => method::GET,
            other => other,
        };
        METHOD.put(&mut response.0, u32::from(method | RESPONSE));
        STATUS.put(&mut response.0, 0);
        response.0[RMPP..RMPP + RMPP_HEADER].fill(0);
        response
    }

    /// Returns the response with a record.
    pub fn response(&self, record: &[u8]) -> Self {
        let mut response = self.response_header();
        response.0[RECORD..].fill(0);
        put_bytes(&mut response.0, RECORD, record);
        response
    }

    /// Returns the response that reports `status`, with the record of the request.
    pub fn error_response(&self, status: u16) -> Self {
        let mut response = self.response_header();
        STATUS.put(&mut response.0, u32::from(status));
        response
    }
}

/// A response of any number of records.
pub(super) struct TableResponse {
    response: Mad,
    data: Vec<u8>,
}

/// Limit of segments in a table. All are sent at once, without waiting for
/// acknowledgements; Linux accepts this many.
const MAX_SEGMENTS: usize = 64;

impl TableResponse {
    /// All records have the same size, a multiple of eight bytes.
    pub fn new(request: &Mad, records: &[Vec<u8>]) -> Self {
        let mut response = request.response_header();
        let size = records.first().map_or(0, Vec::len);
        ATTRIBUTE_OFFSET.put(&mut response.0, (size / 8) as u32);
        if records.len() * size > MAX_SEGMENTS * DATA {
            response = request.error_response(TOO_MANY_RECORDS);
        }
        Self {
            response,
            data: records.concat(),
        }
    }

    /// Splits the response into datagrams.
    pub fn segments(self) -> Vec<Mad> {
        const DATA_SEGMENT: u32 = 1;
        const ACTIVE: u32 = 1;
        const FIRST: u32 = 2;
        const LAST: u32 = 4;
        /// No response time is given.
        const NO_TIME: u32 = 0x1f;

        if STATUS.is_set(&self.response.0) {
            return vec![self.response];
        }
        let count = self.data.len().div_ceil(DATA).max(1);
        let mut segments = Vec::with_capacity(count);
        for number in 0..count {
            let rest = self.data.get(number * DATA..).unwrap_or_default();
            let part = &rest[..rest.len().min(DATA)];
            let (first, last) = (number == 0, number + 1 == count);
            // The first segment has the length of the whole response, the last one
            // its own.
            let length = match (first, last) {
                (_, true) => ADMINISTRATION_HEADER + part.len(),
                (true, false) => count * ADMINISTRATION_HEADER + self.data.len(),
                (false, false) => 0,
            };
            let mut segment = self.response.response(part);
            let flag = |set, flag| if set { flag } else { 0 };
            let flags = ACTIVE | flag(first, FIRST) | flag(last, LAST);
            for (field, value) in [
                (RMPP_VERSION, 1),
                (RMPP_TYPE, DATA_SEGMENT),
                (RMPP_RESPONSE_TIME, NO_TIME),
                (RMPP_FLAGS, flags),
                (RMPP_SEGMENT, number as u32 + 1),
                (RMPP_LENGTH, length as u32),
            ] {
                field.put(&mut segment.0, value);
            }
            segments.push(segment);
        }
        segments
    }
}

/// Whether a value satisfies a selector of the request: greater, less, equal, or
/// largest available. Without a requested value, any value does.
pub(super) fn selector_matches(selector: Option<u32>, requested: Option<u32>, actual: u32) -> bool {
    let Some(requested) = requested else {
        return true;
    };
    match selector {
        Some(0) => actual > requested,
        Some(1) => actual < requested,
        Some(2) => actual == requested,
        _ => true,
    }
}
