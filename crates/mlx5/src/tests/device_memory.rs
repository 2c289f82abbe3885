//! Device memory, of a kernel that is played, in pages of a file.

use std::os::unix::fs::FileExt;

use crate::ioctl::ids::*;
use uverbs::abi::ids::*;
use uverbs::abi::later::*;
use uverbs::abi::write::{CMD_FLAG_EXTENDED, ExQueryDeviceResp, cmd};
use uverbs::kernel::fake::Target;
use zerocopy::FromZeros;

use super::objects::FakeDevice;
use crate::{CopyError, CreateError, DeviceBytes, DeviceMemory};

const ALLOC: Target = Target::Method(OBJECT_DM, METHOD_DM_ALLOC);
const QUERY: Target = Target::Method(OBJECT_DM, METHOD_DM_QUERY);
const QUERY_DEVICE: Target = Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE);

/// Where in the file page `low` of device memory's command is, which is 8.
fn at(high: u64, low: u64) -> u64 {
    (high << 16 | 8 << 8 | low) * 4096
}

fn machine(start: u64, index: u16) -> FakeDevice {
    let machine = FakeDevice::new();
    machine.fake.on(QUERY_DEVICE, |reply| {
        let mut answer = ExQueryDeviceResp::new_zeroed();
        answer.response_length = size_of::<ExQueryDeviceResp>() as u32;
        answer.max_dm_size = 0x4000;
        reply.set_core_out(&answer);
        Ok(())
    });
    machine.fake.on(ALLOC, move |reply| {
        reply.set(ATTR_ALLOC_DM_START_OFFSET, &start.to_ne_bytes());
        reply.set(ATTR_ALLOC_DM_PAGE_INDEX, &index.to_ne_bytes());
        Ok(())
    });
    machine
}

#[test]
fn device_memory_is_mapped_as_announced() {
    let machine = machine(0x7_0040, 0x0203);
    machine.pages.set_len(at(2, 4)).unwrap();
    let dm = DeviceMemory::allocate(&machine.context, 0x100, 0).unwrap();
    let from = [1u8, 2, 3, 4, 5, 6, 7, 8];
    // SAFETY: as many bytes as that.
    unsafe { dm.bytes.write(0xf8, from.as_ptr(), 8) }.unwrap();
    let mut found = [0; 8];
    (machine.pages)
        .read_exact_at(&mut found, at(2, 3) + 0x40 + 0xf8)
        .unwrap();
    assert_eq!(found, from);
    (machine.pages)
        .write_all_at(&[9; 4], at(2, 3) + 0x40)
        .unwrap();
    let mut read = [0u8; 8];
    // SAFETY: as many bytes as that.
    unsafe { dm.bytes.read(0, read.as_mut_ptr(), 8) }.unwrap();
    assert_eq!(read, [9, 9, 9, 9, 0, 0, 0, 0]);

    // Another name for it.
    machine.fake.on(QUERY, |reply| {
        reply.set(ATTR_QUERY_DM_START_OFFSET, &0x7_0040u64.to_ne_bytes());
        reply.set(ATTR_QUERY_DM_PAGE_INDEX, &0x0203u16.to_ne_bytes());
        reply.set(ATTR_QUERY_DM_LENGTH, &0x100u64.to_ne_bytes());
        Ok(())
    });
    let again = DeviceBytes::of(&machine.context, dm.object.handle()).unwrap();
    // SAFETY: as many bytes as that.
    unsafe { again.read(0xf8, read.as_mut_ptr(), 8) }.unwrap();
    assert_eq!(read, from);

    // What it is exported by is where it is mapped, under either name.
    for bytes in [&dm.bytes, &again] {
        machine.fake.take_ioctls();
        let buffer = bytes.export(&machine.context).unwrap();
        let calls = machine.fake.take_ioctls();
        let [export] = calls.as_slice() else {
            panic!("{calls:?}");
        };
        let method = (export.object, export.method);
        assert_eq!(method, (OBJECT_DMABUF, METHOD_DMABUF_ALLOC));
        assert_eq!(export.u64(ATTR_ALLOC_DMABUF_PGOFF), Some(at(2, 3)));
        drop(buffer);
    }

    dm.object.destroy().unwrap();
    assert!(machine.fake.live_objects().is_empty());
}

#[test]
fn device_memory_copies_are_bounded() {
    let machine = machine(0, 0);
    machine.pages.set_len(at(0, 1)).unwrap();
    let dm = DeviceMemory::allocate(&machine.context, 0x100, 0).unwrap();
    let mut bytes = [0u8; 0x104];
    for (offset, length, error) in [
        (0, 0x104, CopyError::Beyond),
        (0x100, 4, CopyError::Beyond),
        (u64::MAX, 4, CopyError::Beyond),
        (u64::MAX - 3, 4, CopyError::Beyond),
        (4, usize::MAX - 3, CopyError::Beyond),
        (2, 4, CopyError::NotWords),
        (0, 6, CopyError::NotWords),
    ] {
        // SAFETY: what is longer than the buffer is refused.
        let copied = unsafe {
            [
                dm.bytes.read(offset, bytes.as_mut_ptr(), length),
                dm.bytes.write(offset, bytes.as_ptr(), length),
            ]
        };
        assert_eq!(copied, [Err(error); 2], "{length} at {offset}");
    }
    assert_eq!(CopyError::Beyond.errno(), libc::EFAULT);
    assert_eq!(CopyError::NotWords.errno(), libc::EINVAL);
}

#[test]
fn malformed_device_memory_answers_are_refused() {
    // It would end beyond what was mapped, or begin within a word.
    for start in [0xf40, 2] {
        let machine = machine(start, 0);
        machine.pages.set_len(at(0, 1)).unwrap();
        let error = DeviceMemory::allocate(&machine.context, 0x100, 0).unwrap_err();
        assert_eq!(error.errno(), libc::EPROTO, "{start:#x}");
        assert!(machine.fake.live_objects().is_empty());
    }
    let machine = machine(0, 0);
    machine.pages.set_len(at(0, 8)).unwrap();
    let allocate = |length| DeviceMemory::allocate(&machine.context, length, 0);
    assert!(allocate(0x4000).is_ok());
    let error = allocate(0x4001).unwrap_err();
    assert!(matches!(error, CreateError::TooLarge { .. }), "{error}");
    assert_eq!(error.errno(), libc::EINVAL);
    assert_eq!(allocate(0).unwrap_err().errno(), libc::EPROTO);
    assert!(machine.fake.live_objects().is_empty());
}
