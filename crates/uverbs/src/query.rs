//! Queries of a device, a port, and the GID table.

use zerocopy::{FromZeros, IntoBytes};

use crate::abi::write::{CMD_FLAG_EXTENDED, ExQueryDevice, ExQueryDeviceResp, QueryDevice, cmd};
use crate::abi::{ids, later};
use crate::command::Ioctl;
use crate::driver::DriverOutput;
use crate::{
    Command, Context, ContextInfo, DeviceAttr, DeviceAttrEx, Error, GidEntry, PortAttr, Udata,
};

impl Context {
    /// Creates the kernel's context of this open file: once per open file, and
    /// before any other command.
    ///
    /// # Errors
    /// EINVAL if the file already has a context, EIO if the device was removed.
    pub fn get_context(&self, udata: Udata<'_>) -> Result<ContextInfo, Error> {
        let (mut vectors, mut support) = (0u32, 0u64);
        let mut ioctl = Ioctl::new(
            Command::GetContext,
            ids::OBJECT_DEVICE,
            ids::METHOD_GET_CONTEXT,
        );
        let slot = ioctl.output(
            ids::ATTR_GET_CONTEXT_NUM_COMP_VECTORS,
            vectors.as_mut_bytes(),
        );
        ioctl.output(ids::ATTR_GET_CONTEXT_CORE_SUPPORT, support.as_mut_bytes());
        ioctl.udata(udata);
        ioctl.run(self)?.written(slot)?;
        Ok(ContextInfo {
            num_comp_vectors: vectors,
            core_support: support,
        })
    }

    /// Returns what [`get_context`](Self::get_context) returned, for a file
    /// whose context was created elsewhere.
    ///
    /// # Errors
    /// EOPNOTSUPP if the driver cannot share contexts.
    pub fn query_context(&self) -> Result<ContextInfo, Error> {
        self.query_context_with([])
    }

    /// As [`query_context`](Self::query_context), with outputs that the driver
    /// adds.
    ///
    /// # Errors
    /// As [`query_context`](Self::query_context); EINVAL if the file has no
    /// context yet, EPROTONOSUPPORT if the kernel or the driver does not
    /// support the outputs, EIO if the device was removed.
    pub fn query_context_with<const N: usize>(
        &self,
        outputs: [DriverOutput<'_>; N],
    ) -> Result<ContextInfo, Error> {
        let (mut vectors, mut support) = (0u32, 0u64);
        let mut ioctl = Ioctl::new(
            Command::QueryContext,
            ids::OBJECT_DEVICE,
            ids::METHOD_QUERY_CONTEXT,
        );
        let slot = ioctl.output(
            ids::ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
            vectors.as_mut_bytes(),
        );
        ioctl.output(ids::ATTR_QUERY_CONTEXT_CORE_SUPPORT, support.as_mut_bytes());
        let outputs = outputs.map(|output| ioctl.output(output.attr_id, output.buffer));
        let answer = ioctl.run(self)?;
        answer.written(slot)?;
        answer.all_written(&outputs)?;
        Ok(ContextInfo {
            num_comp_vectors: vectors,
            core_support: support,
        })
    }

    /// Queries the capabilities of the device.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query_device(&self) -> Result<DeviceAttr, Error> {
        let mut resp = DeviceAttr::new_zeroed();
        Ioctl::write(
            Command::QueryDevice,
            cmd::CMD_QUERY_DEVICE,
            &QueryDevice::default(),
            &mut resp,
        )
        .run(self)?;
        Ok(resp)
    }

    /// Queries the capabilities of the device, including later additions. What
    /// this kernel does not know is zero; `response_length` is the length of
    /// its answer.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query_device_ex(&self, udata: Udata<'_>) -> Result<DeviceAttrEx, Error> {
        let mut resp = DeviceAttrEx::new_zeroed();
        let command = Command::QueryDeviceEx;
        let number = CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE;
        Ioctl::write(command, number, &ExQueryDevice::default(), &mut resp)
            .udata(udata)
            .run(self)?;
        let least = core::mem::offset_of!(ExQueryDeviceResp, odp_caps);
        if (resp.response_length as usize) < least {
            return Err(Error::BadAnswer {
                command,
                what: "the answer ends before its fixed part",
            });
        }
        Ok(resp)
    }

    /// Queries state and limits of a port, from 1.
    ///
    /// # Errors
    /// EINVAL if the port does not exist.
    pub fn query_port(&self, port: u8) -> Result<PortAttr, Error> {
        let mut attr = PortAttr::default();
        let mut ioctl = Ioctl::new(
            Command::QueryPort,
            ids::OBJECT_DEVICE,
            ids::METHOD_QUERY_PORT,
        );
        ioctl.constant(ids::ATTR_QUERY_PORT_PORT_NUM, port.into());
        let slot = ioctl.output(ids::ATTR_QUERY_PORT_RESP, attr.as_mut_bytes());
        ioctl.run(self)?.written(slot)?;
        Ok(attr)
    }

    /// Queries the current rate of a port, from 1, in units of 100 Mbit/s.
    /// Covers rates that no combination of width and speed codes expresses,
    /// such as those of bonded ports.
    ///
    /// # Errors
    /// EINVAL if the port does not exist; EOPNOTSUPP or EPROTONOSUPPORT if the
    /// driver or the kernel does not support the query.
    pub fn query_port_speed(&self, port: u32) -> Result<u64, Error> {
        let mut speed = 0u64;
        let mut ioctl = Ioctl::new(
            Command::QueryPortSpeed,
            ids::OBJECT_DEVICE,
            later::METHOD_QUERY_PORT_SPEED,
        );
        ioctl.constant(later::ATTR_QUERY_PORT_SPEED_PORT_NUM, port.into());
        let slot = ioctl.output(later::ATTR_QUERY_PORT_SPEED_RESP, speed.as_mut_bytes());
        ioctl.run(self)?.written(slot)?;
        Ok(speed)
    }

    /// Writes all GIDs of all ports that are not empty to `entries`; returns
    /// their number.
    ///
    /// # Errors
    /// EINVAL if `entries` is empty, too small, or longer than 2047.
    pub fn query_gid_table(&self, entries: &mut [GidEntry]) -> Result<usize, Error> {
        let room = entries.len();
        let mut count = 0u64;
        let command = Command::QueryGidTable;
        let mut ioctl = Ioctl::new(command, ids::OBJECT_DEVICE, ids::METHOD_QUERY_GID_TABLE);
        ioctl.constant(
            ids::ATTR_QUERY_GID_TABLE_ENTRY_SIZE,
            size_of::<GidEntry>() as u64,
        );
        ioctl.u32(ids::ATTR_QUERY_GID_TABLE_FLAGS, 0);
        ioctl.output(
            ids::ATTR_QUERY_GID_TABLE_RESP_ENTRIES,
            entries.as_mut_bytes(),
        );
        let slot = ioctl.output(
            ids::ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES,
            count.as_mut_bytes(),
        );
        ioctl.run(self)?.written(slot)?;
        match usize::try_from(count) {
            Ok(count) if count <= room => Ok(count),
            _ => Err(Error::BadAnswer {
                command,
                what: "more GIDs than fit the buffer",
            }),
        }
    }

    /// Returns whether the device is gone (unplugged, or its driver unloaded),
    /// in which case the kernel has detached all objects from it. Uses a
    /// command that the kernel answers without the driver, so that an error of
    /// a driver whose device is alive is not mistaken for it.
    ///
    /// One system call.
    pub fn is_gone(&self) -> bool {
        self.query_gid_entry(1, 0)
            .is_err_and(|error| error.is_device_gone())
    }

    /// Queries one GID of a port's table.
    ///
    /// # Errors
    /// ENODATA if the entry is empty, EINVAL if the port or the entry does not
    /// exist.
    pub fn query_gid_entry(&self, port: u32, index: u32) -> Result<GidEntry, Error> {
        let mut entry = GidEntry::default();
        let mut ioctl = Ioctl::new(
            Command::QueryGidEntry,
            ids::OBJECT_DEVICE,
            ids::METHOD_QUERY_GID_ENTRY,
        );
        ioctl.constant(ids::ATTR_QUERY_GID_ENTRY_PORT, port.into());
        ioctl.constant(ids::ATTR_QUERY_GID_ENTRY_GID_INDEX, index.into());
        ioctl.u32(ids::ATTR_QUERY_GID_ENTRY_FLAGS, 0);
        let slot = ioctl.output(ids::ATTR_QUERY_GID_ENTRY_RESP_ENTRY, entry.as_mut_bytes());
        ioctl.run(self)?.written(slot)?;
        Ok(entry)
    }
}
