//! Creates an rxe device by RDMA netlink, as `rdma link add` does, for guests without
//! iproute2.

use std::io::IoSlice;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendmsg, socket,
};

/// `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_NEWLINK)`.
const NEW_LINK: u16 = (5 << 10) + 3;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const FLAGS: u16 = 1 | 4;
/// `NLMSG_ERROR`.
const ERROR: u16 = 2;
/// `RDMA_NLDEV_ATTR_DEV_NAME`, `..._NDEV_NAME`, `..._LINK_TYPE`.
const DEVICE_NAME: u16 = 2;
const NETDEV_NAME: u16 = 51;
const LINK_TYPE: u16 = 65;
/// `struct nlmsghdr`.
const HEADER: usize = 16;

/// Creates the rxe device `name` on a network device. The module must be loaded.
pub fn add(name: &str, netdev: &str) -> Result<()> {
    let context = || format!("cannot create the rxe device {name} on {netdev}");
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRDMA,
    )
    .with_context(context)?;
    let request = request(name, netdev);
    let kernel = NetlinkAddr::new(0, 0);
    sendmsg(
        socket.as_raw_fd(),
        &[IoSlice::new(&request)],
        &[],
        MsgFlags::empty(),
        Some(&kernel),
    )
    .with_context(context)?;
    let mut answer = [0; 4096];
    let len = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).with_context(context)?;
    match ack_errno(&answer[..len])? {
        0 => Ok(()),
        errno => Err(Errno::from_raw(errno)).with_context(context),
    }
}

fn request(name: &str, netdev: &str) -> Vec<u8> {
    let mut message = vec![0; HEADER];
    let attributes = [
        (DEVICE_NAME, name),
        (LINK_TYPE, "rxe"),
        (NETDEV_NAME, netdev),
    ];
    for (attribute, text) in attributes {
        // A header of four bytes, and a NUL after the text.
        let len = 4 + text.len() + 1;
        message.extend((len as u16).to_ne_bytes());
        message.extend(attribute.to_ne_bytes());
        message.extend(text.bytes());
        message.resize(message.len() + 1 + len.next_multiple_of(4) - len, 0);
    }
    let len = message.len() as u32;
    message[..4].copy_from_slice(&len.to_ne_bytes());
    message[4..6].copy_from_slice(&NEW_LINK.to_ne_bytes());
    message[6..8].copy_from_slice(&FLAGS.to_ne_bytes());
    message
}

/// Returns the errno of an acknowledgement; 0 on success.
fn ack_errno(answer: &[u8]) -> Result<i32> {
    ensure!(answer.len() >= HEADER + 4, "truncated netlink answer");
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    if kind != ERROR {
        bail!("netlink answer of type {kind:#x} instead of an acknowledgement");
    }
    let [a, b, c, d] = [answer[16], answer[17], answer[18], answer[19]];
    Ok(-i32::from_ne_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_padded_and_counted() {
        let request = request("rxe0", "eth10");
        // Texts of 4, 3 and 5 bytes with their NULs, each with a header.
        assert_eq!(request.len(), 16 + 12 + 8 + 12);
        assert_eq!(request[..4], 48u32.to_ne_bytes());
        assert_eq!(request[4..6], 0x1403u16.to_ne_bytes());
        assert_eq!(&request[20..28], b"rxe0\0\0\0\0");
        assert_eq!(&request[32..36], b"rxe\0");
        assert_eq!(&request[40..48], b"eth10\0\0\0");
    }

    #[test]
    fn an_acknowledgement_is_read() {
        let mut answer = [0; 36];
        answer[4..6].copy_from_slice(&ERROR.to_ne_bytes());
        assert_eq!(ack_errno(&answer).unwrap(), 0);
        answer[16..20].copy_from_slice(&(-17i32).to_ne_bytes());
        assert_eq!(ack_errno(&answer).unwrap(), 17);
        assert!(ack_errno(&answer[..19]).is_err());
        answer[4] = 9;
        assert!(ack_errno(&answer).is_err());
    }
}
