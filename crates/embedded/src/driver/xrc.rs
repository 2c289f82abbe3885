//! XRC domains, and XRC targets, which are looked up by number in their domain.
//!
//! An XRC domain or target that was opened several times, by any contexts, is a
//! single object of the device with several objects here; it is destroyed with
//! the last of them.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::stat::fstat;
use softhca::command::opcode as op;
use softhca::layout::qpc::{rq_type, st};
use softhca::layout::{PAGE_LIST, qpc};
use softhca::rule::Rule;
use uverbs::QpType;
use uverbs::abi::ids::*;
use uverbs::abi::write::{CreateQpResp, ModifyQp, OpenQp, OpenXrcd, OpenXrcdResp};

use crate::driver::cause::{Class, Result, errno_of, invalid, is, refuse, require, system};
use crate::driver::command::{Input, make};
use crate::driver::event::EventCounter;
use crate::driver::object::{Events, Object, ObjectData, Objects, Qp, SrqKind, Summary, Xrcd};
use crate::driver::queues::{QpDriver, check_absent, check_no_source, create_flags};
use crate::driver::request::Request;
use crate::driver::state::State;

/// Duplicates a descriptor, and returns it with the device and inode of its file.
///
/// # Safety
/// `fd` must be open, or negative.
unsafe fn duplicate(fd: RawFd) -> Result<(OwnedFd, (u64, u64))> {
    if fd < 0 {
        return refuse(Class::BadDescriptor, "fd", fd, Rule::Exists);
    }
    // SAFETY: it is not negative, and open, as the caller guarantees.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let number = fd.as_raw_fd();
    let Ok(file) = fd.try_clone_to_owned() else {
        return refuse(Class::BadDescriptor, "fd", number, Rule::Exists);
    };
    match fstat(&file) {
        Ok(stat) => Ok((file, (stat.st_dev, stat.st_ino))),
        Err(errno) => Err(system("fd", number)(errno_of(errno))),
    }
}

impl Objects {
    /// Returns the objects that represent a domain of the device.
    pub(crate) fn xrcds(&self, number: u32) -> impl Iterator<Item = &Xrcd> {
        let domains = self.all().filter_map(Object::of::<Xrcd>);
        domains.filter(move |it| it.number == number)
    }

    /// Returns the objects that represent a queue pair of the device.
    pub(crate) fn qps(&self, number: u32) -> impl Iterator<Item = &Qp> {
        self.numbered(OBJECT_QP, number).filter_map(Object::of)
    }
}

impl ObjectData for Xrcd {
    fn kind(&self) -> u16 {
        OBJECT_XRCD
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "XRC domain",
            number: self.number,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        // One that was opened several times stays until the last one is destroyed.
        if state.objects.xrcds(self.number).next().is_some() {
            return Ok(());
        }
        state.destroy_number(op::DEALLOC_XRCD, self.number)
    }
}

impl State {
    /// # Safety
    /// The descriptor in the command must be open.
    pub(crate) unsafe fn open_xrcd(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        const NONE: u32 = u32::MAX;
        let requested: OpenXrcd = request.core()?;
        let oflags = requested.oflags as i32;
        let (file, inode) = match requested.fd {
            NONE => (None, None),
            of => {
                // SAFETY: guaranteed by the caller.
                let (file, inode) = unsafe { duplicate(of as RawFd) }?;
                (Some(file), Some(inode))
            }
        };
        let has_inode = |it: &Xrcd| it.inode.is_some() && it.inode == inode;
        let existing = self.objects.find(has_inode).map(|(_, it)| it.number);
        let number = match existing {
            Some(_) if oflags & libc::O_EXCL != 0 => {
                return invalid("oflags", oflags, Rule::Excludes(libc::O_EXCL as u64));
            }
            Some(number) => number,
            None if inode.is_some() && oflags & libc::O_CREAT == 0 => {
                let needed = Rule::Contains(libc::O_CREAT as u64);
                return refuse(Class::Again, "oflags", oflags, needed);
            }
            None => make(&mut self.hca, &Input::new(op::ALLOC_XRCD, 16))?,
        };
        let xrcd_handle = self.objects.insert(Object::new(
            fd,
            Xrcd {
                number,
                inode,
                _file: file,
            },
        ));
        request.core_answer(&OpenXrcdResp { xrcd_handle });
        Ok(())
    }

    /// Creates an XRC target, which has no queues: their sizes and driver data
    /// are ignored.
    pub(crate) fn create_target(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        const UNSUPPORTED: [u16; 4] = [
            ATTR_CREATE_QP_RECV_CQ_HANDLE,
            ATTR_CREATE_QP_SEND_CQ_HANDLE,
            ATTR_CREATE_QP_PD_HANDLE,
            ATTR_CREATE_QP_IND_TABLE_HANDLE,
        ];
        check_absent(request, &UNSUPPORTED)?;
        let xrcd = request.handle(ATTR_CREATE_QP_XRCD_HANDLE)?;
        create_flags(request, QpType::XRC_TGT)?;
        if let Some(srq) = request.optional_handle(ATTR_CREATE_QP_SRQ_HANDLE) {
            let is_xrc = self.objects.srq(fd, srq)?.kind == SrqKind::Xrc;
            require(is_xrc, "handle", srq, Rule::OfType("XRC SRQ"))?;
        }
        QpDriver::new(request)?;
        check_no_source(request)?;
        let domain = self.objects.xrcd(fd, xrcd)?.number;
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let input = Input::new(op::CREATE_QP, PAGE_LIST).fields(
            qpc::AT,
            [
                (qpc::ST, st::XRC),
                (qpc::PD, self.pd),
                (qpc::NO_SQ, 1),
                (qpc::XRCD, domain),
                (qpc::RQ_TYPE, rq_type::SRQ),
            ],
        );
        let number = make(&mut self.hca, &input)?;
        let qp = target(number, domain, ModifyQp::default(), events);
        self.add_qp(
            request,
            object(fd, xrcd, qp),
            number,
            [0; 5],
            mlx5_abi::CreateQpResp::default(),
        );
        Ok(())
    }

    /// Opens an XRC target of a domain, by its number.
    pub(crate) fn open_qp(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: OpenQp = request.core()?;
        let xrcd = requested.pd_handle;
        let domain = self.objects.xrcd(fd, xrcd);
        let domain = domain
            .map_err(|error| error.as_class(Class::Invalid))?
            .number;
        is("qp_type", requested.qp_type, QpType::XRC_TGT.0.into())?;
        let of_domain = |qp: &&Qp| qp.domain == Some(domain);
        let Some(qp) = self.objects.qps(requested.qpn).find(of_domain) else {
            return invalid("qpn", requested.qpn, Rule::Exists);
        };
        let attributes = qp.attributes;
        let events = Events {
            user_handle: requested.user_handle,
            file: None,
            reported: EventCounter::default(),
        };
        let qp = target(requested.qpn, domain, attributes, events);
        let qp_handle = self.objects.insert(object(fd, xrcd, qp));
        request.core_answer(&CreateQpResp {
            qp_handle,
            qpn: requested.qpn,
            ..CreateQpResp::default()
        });
        Ok(())
    }
}

fn target(number: u32, domain: u32, attributes: ModifyQp, events: Events) -> Qp {
    Qp {
        domain: Some(domain),
        attributes,
        ..Qp::without_queues(number, QpType::XRC_TGT, events)
    }
}

fn object(fd: RawFd, xrcd: u32, qp: Qp) -> Object {
    Object::new(fd, qp).using(vec![xrcd])
}
