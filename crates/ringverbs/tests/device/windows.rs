//! Memory windows: whom they give access to what, and how it is taken back.

use ringverbs::query::DriverId;
use ringverbs::{
    AccessFlags, Context, Error, Inline, MemoryWindow, RemoteAddr, RemoteRegion, Status, Transport,
    WindowType, WorkRequest,
};

use crate::operations::{bytes, remote};
use crate::{Pair, has};

pub(crate) fn is_rxe(context: &Context) -> bool {
    let device = context.device();
    device.is_some_and(|device| device.found().driver_id == DriverId::RXE)
}

/// Binds a window to bytes 64 to 128 of a region of the second queue pair's
/// side, as a work request of that: it is written to.
fn bind(pair: &mut Pair, window: &MemoryWindow, region: &RemoteRegion) -> RemoteAddr {
    let part = region.slice(64..128).unwrap();
    let at = part.key().addr;
    let request = WorkRequest::bind(window, part, AccessFlags::REMOTE_WRITE);
    pair.b.post(request.token(1)).unwrap();
    pair.wait_for(1).result.unwrap();
    RemoteAddr::new(at, window.rkey())
}

#[test]
fn windows_grant_and_revoke_access() {
    for transport in [Transport::Reliable, Transport::Unreliable] {
        let mut pair = Pair::new(transport);
        let region = remote(&pair, AccessFlags::MW_BIND);
        for kind in [WindowType::One, WindowType::Two] {
            let Some(window) = has(pair.domain.memory_window(kind)) else {
                return;
            };
            for _ in 0..3 {
                let before = window.rkey();
                let key = bind(&mut pair, &window, &region);
                assert_ne!(window.rkey(), before);
                let outgoing = pair.filled(b"through a window");
                let (at, incoming) = (key, pair.buffer(1));
                pair.b.receive(incoming, 3).unwrap();
                let request = WorkRequest::write(outgoing, at).immediate(5);
                pair.a.post(request.token(2)).unwrap();
                for done in pair.wait(2) {
                    assert!(done.result.is_ok(), "{transport:?} {kind:?}: {done:?}");
                }
                assert_eq!(bytes(&region, 64, 16), b"through a window");
                region.write_at(64, &[0; 16]).unwrap();
                if (transport, kind) == (Transport::Unreliable, WindowType::Two)
                    && is_rxe(&pair.context)
                {
                    // `rxe_wr_opcode_info` of Linux's rxe_opcode.c.
                    testing::skip!("rdma_rxe invalidates on reliable connections only");
                    break;
                }
                let request = match kind {
                    WindowType::One => WorkRequest::unbind(&window),
                    WindowType::Two => WorkRequest::local_invalidate(window.rkey()),
                };
                pair.b.post(request.token(3)).unwrap();
                pair.wait_for(3).result.unwrap();
            }
            window.close().unwrap();
        }
        region.close().unwrap();
    }
}

#[test]
fn a_send_invalidates_a_key_of_the_peer() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = remote(&pair, AccessFlags::MW_BIND);
    let Some(window) = has(pair.domain.memory_window(WindowType::Two)) else {
        return;
    };
    bind(&mut pair, &window, &region);
    let incoming = pair.buffer(10);
    pair.b.receive(incoming, 2).unwrap();
    let request = WorkRequest::send(Inline(b"done")).invalidate(window.rkey());
    pair.a.post(request.token(3)).unwrap();
    let done = pair.wait(2);
    assert_eq!(done[0].result.unwrap().invalidated(), Some(window.rkey()));
}

/// Methods of revoking access, and accesses that a key never allows (`Outside`, `Read`).
#[derive(Clone, Copy, Debug)]
enum Revocation {
    Unbind,
    Invalidate,
    InvalidatedByThePeer,
    Rebind,
    Close,
    Drop,
    Outside,
    Read,
}

#[test]
fn revoked_key_gives_no_access() {
    use WindowType::{One, Two};
    let cases = [
        (One, Revocation::Unbind),
        (Two, Revocation::Invalidate),
        (Two, Revocation::InvalidatedByThePeer),
        (One, Revocation::Rebind),
        (One, Revocation::Close),
        (Two, Revocation::Close),
        (One, Revocation::Drop),
        (Two, Revocation::Drop),
        (One, Revocation::Outside),
        (Two, Revocation::Outside),
        (One, Revocation::Read),
        (Two, Revocation::Read),
    ];
    for (kind, revocation) in cases {
        let mut pair = Pair::new(Transport::Reliable);
        if matches!(revocation, Revocation::Outside) && is_rxe(&pair.context) {
            // It checks accesses against the bounds of the region, not of the
            // window (`check_rkey` of Linux's rxe_resp.c).
            testing::skip!("rdma_rxe lets a window's peer beyond its end");
            continue;
        }
        let region = remote(&pair, AccessFlags::MW_BIND);
        region.write_at(0, &[9; 4096]).unwrap();
        let Some(window) = has(pair.domain.memory_window(kind)) else {
            return;
        };
        let mut at = bind(&mut pair, &window, &region);
        let mut rest = None;
        match revocation {
            Revocation::Unbind => {
                pair.b.post(WorkRequest::unbind(&window)).unwrap();
                pair.wait_for(0).result.unwrap();
                rest = Some(window);
            }
            Revocation::Invalidate => {
                let request = WorkRequest::local_invalidate(window.rkey());
                pair.b.post(request).unwrap();
                pair.wait_for(0).result.unwrap();
                rest = Some(window);
            }
            Revocation::InvalidatedByThePeer => {
                let incoming = pair.buffer(10);
                pair.b.receive(incoming, 0).unwrap();
                let request = WorkRequest::send(Inline(b"done")).invalidate(at.rkey);
                pair.a.post(request).unwrap();
                for done in pair.wait(2) {
                    done.result.unwrap();
                }
                rest = Some(window);
            }
            Revocation::Rebind => {
                bind(&mut pair, &window, &region);
                rest = Some(window);
            }
            Revocation::Close => window.close().unwrap(),
            Revocation::Drop => drop(window),
            // The last byte is one too far.
            Revocation::Outside => {
                at = at.offset(60);
                rest = Some(window);
            }
            Revocation::Read => rest = Some(window),
        }
        let data = pair.filled(b"late!");
        match revocation {
            Revocation::Read => pair.a.read(data, at, 7).unwrap(),
            _ => pair.a.write(data, at, 7).unwrap(),
        }
        let done = pair.wait_for(7);
        assert_eq!(
            done.status(),
            Status::REM_ACCESS_ERR,
            "{kind:?} {revocation:?}"
        );
        assert_eq!(
            bytes(&region, 0, 4096),
            [9; 4096],
            "{kind:?} {revocation:?}"
        );
        drop(rest);
        region.close().unwrap();
    }
}

/// What the specification forbids to bind (volume 1, 10.6.7.2): C10-73, a region
/// without the right to bind; o10-37.2.30, a window of type 2 that is bound.
#[test]
fn forbidden_binds_are_refused() {
    use WindowType::{One, Two};
    for (kind, access) in [
        (One, AccessFlags::empty()),
        (Two, AccessFlags::empty()),
        (One, AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ),
        (Two, AccessFlags::MW_BIND),
    ] {
        let mut pair = Pair::new(Transport::Reliable);
        let region = remote(&pair, access);
        let Some(window) = has(pair.domain.memory_window(kind)) else {
            return;
        };
        let at = RemoteAddr::new(region.key().addr, window.rkey());
        if access.contains(AccessFlags::MW_BIND) {
            bind(&mut pair, &window, &region);
        }
        let before = window.rkey();
        let part = region.slice(0..64).unwrap();
        let request = WorkRequest::bind(&window, part, AccessFlags::REMOTE_WRITE);
        match pair.b.post(request.token(1)) {
            Err(refused) => assert!(matches!(refused.error, Error::Invalid { .. }), "{refused}"),
            Ok(()) => {
                let status = pair.wait_for(1).status();
                // rdma_rxe enters the error state first, and flushes the bind with
                // all else (`rxe_completer` of Linux 6.12).
                let flushed = status == Status::WR_FLUSH_ERR && is_rxe(&pair.context);
                let failed = status == Status::MW_BIND_ERR || flushed;
                assert!(failed, "{kind:?} {access:?}: {status:?}");
                assert_eq!(window.rkey(), before, "{kind:?} {access:?}");
                // The queue pair is in the error state: it answers no write.
                continue;
            }
        }
        assert_eq!(window.rkey(), before, "{kind:?} {access:?}");
        // The window's key does not open what it was not bound to.
        let data = pair.filled(b"through");
        pair.a.write(data, at, 2).unwrap();
        let done = pair.wait_for(2);
        assert_ne!(done.status(), Status::SUCCESS, "{kind:?} {access:?}");
        assert_eq!(bytes(&region, 0, 7), [0; 7], "{kind:?} {access:?}");
        window.close().unwrap();
        region.close().unwrap();
    }
}

/// The same on every device, whatever it costs there.
#[test]
fn key_changes_need_the_builder_option() {
    let mut pair = Pair::with(Transport::Reliable, |builder| builder);
    let region = remote(&pair, AccessFlags::MW_BIND);
    let Some(window) = has(pair.domain.memory_window(WindowType::One)) else {
        return;
    };
    let part = region.slice(..).unwrap();
    let refused = [
        pair.a.post(WorkRequest::unbind(&window)).unwrap_err().error,
        pair.a
            .post(WorkRequest::local_invalidate(window.rkey()))
            .unwrap_err()
            .error,
        pair.a
            .post(WorkRequest::bind(&window, part, AccessFlags::empty()))
            .unwrap_err()
            .error,
    ];
    for error in refused {
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    window.close().unwrap();
    region.close().unwrap();
}
