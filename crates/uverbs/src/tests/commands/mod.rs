//! The attributes that each command sends, and its handling of the answer.

mod counters;
mod device_memory;
mod driver;
mod memory;
mod queries;
mod queue_pair;
mod queues;

use zerocopy::IntoBytes;

use super::{borrowed_fd, context};
use crate::abi::ids::*;
use crate::abi::write::cmd;
use crate::kernel::fake::{IoctlCall, Target};
use crate::*;

/// An attribute as it was sent: number, length, and input bytes or handle.
#[derive(Clone, Debug, PartialEq)]
enum SentAttr {
    /// Input bytes.
    In(u16, Vec<u8>),
    /// Output buffer.
    Out(u16, u16),
    /// Handle or descriptor.
    Object(u16, u64),
}

fn sent_attrs(call: &IoctlCall) -> Vec<SentAttr> {
    let convert = |recorded: &crate::kernel::fake::Recorded| {
        let attr = recorded.attr;
        assert_eq!(attr.flags, 1, "every attribute is mandatory");
        match (attr.len, recorded.bytes.is_empty()) {
            (0, _) => SentAttr::Object(attr.attr_id, attr.data),
            (_, false) => SentAttr::In(attr.attr_id, recorded.bytes.clone()),
            (len, true) => SentAttr::Out(attr.attr_id, len),
        }
    };
    call.attrs.iter().map(convert).collect()
}

fn in32(id: u16, value: u32) -> SentAttr {
    SentAttr::In(id, value.to_ne_bytes().to_vec())
}

fn in64(id: u16, value: u64) -> SentAttr {
    SentAttr::In(id, value.to_ne_bytes().to_vec())
}

/// Returns the only call since the last `take_ioctls`.
fn only(fake: &crate::kernel::fake::FakeKernel) -> IoctlCall {
    let mut calls = fake.take_ioctls();
    assert_eq!(calls.len(), 1, "{calls:#?}");
    calls.remove(0)
}

fn is_method(call: &IoctlCall, object: u16, method: u16) {
    assert_eq!((call.object, call.method), (object, method));
}

/// Checks a write command: number, exact structure, and size of the answer
/// buffer.
fn is_write<T>(call: &IoctlCall, number: u32, request: T, answer: u16)
where
    T: zerocopy::FromBytes + PartialEq + core::fmt::Debug,
{
    is_method(call, OBJECT_DEVICE, METHOD_INVOKE_WRITE);
    assert_eq!(call.u64(ATTR_WRITE_CMD), Some(number.into()));
    assert_eq!(call.core_in::<T>().unwrap(), request);
    assert_eq!(
        call.attr(ATTR_CORE_OUT)
            .map_or(0, |recorded| recorded.attr.len),
        answer
    );
}

/// Driver data for a driver that takes no addresses.
fn udata<'a>(input: &'a [u8], output: &'a mut [u8]) -> Udata<'a> {
    // SAFETY: the fake's driver ignores its data.
    unsafe { Udata::new(input, output) }
}

#[test]
fn get_context() {
    let (fake, context) = context();
    fake.on(Target::Method(OBJECT_DEVICE, METHOD_GET_CONTEXT), |reply| {
        reply.set(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 7u32.as_bytes());
        reply.set(ATTR_GET_CONTEXT_CORE_SUPPORT, 1u64.as_bytes());
        reply.set_driver_out(&[9; 100]);
        Ok(())
    });
    let mut answer = [0xff; 12];
    let info = context.get_context(udata(&[1, 2, 3], &mut answer)).unwrap();
    assert_eq!(
        info,
        ContextInfo {
            num_comp_vectors: 7,
            core_support: 1
        }
    );
    assert!(info.optional_mr_access());
    assert_eq!(answer, [9; 12], "a longer answer is cut off");
    let call = only(&fake);
    is_method(&call, OBJECT_DEVICE, METHOD_GET_CONTEXT);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Out(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 4),
            SentAttr::Out(ATTR_GET_CONTEXT_CORE_SUPPORT, 8),
            SentAttr::In(ATTR_UHW_IN, vec![1, 2, 3]),
            SentAttr::Out(ATTR_UHW_OUT, 12),
        ]
    );
    context.query_context().unwrap();
    is_method(&only(&fake), OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
}

#[test]
fn driver_data_that_is_not_answered_reads_as_zero() {
    let (fake, context) = context();
    fake.on(Target::Write(cmd::CMD_ALLOC_PD), |reply| {
        reply.set_driver_out(&[5; 4]);
        Ok(())
    });
    let mut answer = [0xff; 16];
    let _pd = Pd::alloc(&context, Udata::output(&mut answer)).unwrap();
    assert_eq!(answer, [5, 5, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn long_driver_data_is_passed_by_address() {
    let (fake, context) = context();
    let input: Vec<u8> = (0..100).collect();
    let _pd = Pd::alloc(&context, udata(&input, &mut [])).unwrap();
    let call = only(&fake);
    assert_eq!(call.driver_in(), input);
    assert!(
        call.attr(ATTR_UHW_OUT).is_none(),
        "no room asked for, none given"
    );
}

#[test]
fn too_much_driver_data_is_refused_before_the_kernel_is_asked() {
    let (fake, context) = context();
    let mut huge = vec![0; 65536];
    let error = Pd::alloc(&context, Udata::output(&mut huge)).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
    assert_eq!(error.command(), Command::AllocPd);
    let error = Pd::alloc(&context, udata(&huge, &mut [])).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
    assert!(fake.take_calls().is_empty());
}
