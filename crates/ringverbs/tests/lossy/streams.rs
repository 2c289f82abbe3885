//! Streams: the bytes that come out are those that went in.

use std::fs::File;
use std::io::{Error, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use ringverbs::stream::{RdmaListener, RdmaStream, StreamOptions};

use testing::{pattern, setting};

/// Brings this thread into the network namespace that the variable names, if it
/// is set.
fn enter(variable: &str) {
    let Ok(name) = std::env::var(variable) else {
        return;
    };
    let file = File::open(format!("/run/netns/{name}")).unwrap();
    // SAFETY: an open descriptor and a flag; only this thread's own view of the
    // network changes.
    let result = unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) };
    assert_eq!(result, 0, "{name}: {}", Error::last_os_error());
}

#[test]
#[ignore = "needs two rxe devices"]
fn streams_transfer_all_bytes() {
    let address = |variable: &str| -> IpAddr {
        let text = std::env::var(variable).unwrap_or_else(|_| panic!("{variable}: an address"));
        text.parse().unwrap()
    };
    let bytes = setting("BYTES", 1 << 18);
    // Requests to connect get lost as well, and are repeated after seconds.
    let options = StreamOptions::new().connect_timeout(Duration::from_secs(60));
    let to = SocketAddr::from((address("RXE_ADDR1"), 0));
    let (tell, told) = channel();
    let serve = {
        let options = options.clone();
        thread::spawn(move || {
            enter("RXE_NETNS1");
            let listener = RdmaListener::bind_with(to, &options).unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            listener.accept().unwrap().0
        })
    };
    let to = told.recv().unwrap();
    let connect = thread::spawn(move || {
        enter("RXE_NETNS");
        RdmaStream::connect_with(to, &options).unwrap()
    });
    let client = connect.join().unwrap();
    let server = serve.join().unwrap();
    // Not in one device and out of it again.
    assert_eq!(client.local_addr().unwrap().ip(), address("RXE_ADDR"));
    assert_eq!(client.peer_addr().unwrap().ip(), address("RXE_ADDR1"));
    let data = [1, 2].map(|number| {
        let mut data = vec![0; bytes];
        pattern(number, &mut data);
        data
    });
    thread::scope(|scope| {
        for (side, mut stream) in [&client, &server].into_iter().enumerate() {
            let (mine, theirs) = (&data[side], &data[1 - side]);
            scope.spawn(move || {
                stream.write_all(mine).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            });
            scope.spawn(move || {
                let mut read = Vec::new();
                stream.read_to_end(&mut read).unwrap();
                assert_eq!(read.len(), theirs.len());
                assert!(read == *theirs, "the bytes are not those that were written");
            });
        }
    });
}
