//! Two endpoints that speak RoCE v2 over UDP sockets. With port 4791 a card could be the peer.
//!
//! `cargo run -p ringverbs-roce --features test-utils --example udp`

use std::net::{SocketAddr, UdpSocket};
use std::time::Instant;

use ringverbs_roce::packet::{Path, Pool, RecvMeta, Transmit, gid_of_ip};
use ringverbs_roce::transport::model::{Model, Range};
use ringverbs_roce::transport::{
    Operation, QpConfig, QpState, Queue, RecvWork, SendWork, Transport,
};

const QPN: u32 = 100;

/// A transport with one queue pair, whose peer is at an address.
fn transport(host: &mut Model, own: SocketAddr, peer: SocketAddr) -> Transport<Range> {
    let path = Path::ip(gid_of_ip(own.ip()), gid_of_ip(peer.ip()));
    let mut config = QpConfig::default();
    (config.path, config.remote_qpn) = (Some(path), QPN);
    let mut transport = Transport::new(Pool::new());
    transport.create(QPN, config.clone()).unwrap();
    for to in [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend] {
        let modified = transport.modify(host, 0, QPN, to, config.clone());
        modified.unwrap();
    }
    transport
}

fn main() {
    let sockets = ["127.0.0.1", "127.0.0.2"].map(|it| UdpSocket::bind((it, 0)).unwrap());
    let addresses = [0, 1].map(|end: usize| sockets[end].local_addr().unwrap());
    let mut hosts = [Model::default(), Model::default()];
    let mut transports = [0, 1].map(|end| {
        sockets[end].set_nonblocking(true).unwrap();
        transport(&mut hosts[end], addresses[end], addresses[1 - end])
    });
    let (id, length) = (1, 5);
    let local = Range { start: 0, length };
    hosts[0].memory = b"hello".to_vec();
    hosts[1].memory = vec![0; 5];
    let receive = RecvWork { id, length, local };
    hosts[1].queues(QPN).recvs.push_back(receive);
    let send = SendWork::new(id, Operation::Send, length, local);
    hosts[0].queues(QPN).sends.push_back(send);
    transports[0].ring(QPN, Queue::Send);

    let (pool, start) = (Pool::new(), Instant::now());
    while hosts[0].sends_ended == 0 && start.elapsed().as_secs() < 10 {
        for (end, transport) in transports.iter_mut().enumerate() {
            let now = start.elapsed().as_nanos() as u64;
            let mut buffer = [0; 8192];
            while let Ok((length, from)) = sockets[end].recv_from(&mut buffer) {
                let meta = RecvMeta::new(from, addresses[end].ip());
                let headers = meta.headers().unwrap();
                if let Ok(frame) = headers.frame(&pool, &buffer[..length]) {
                    transport.receive(&mut hosts[end], now, frame);
                }
            }
            while transport.run(&mut hosts[end], now, 64) {}
            while let Some(mut frame) = transport.pop() {
                let mut transmit = Transmit::parse(&frame).unwrap();
                transmit.set_port(&mut frame, addresses[end].port());
                let datagram = &frame.frame()[transmit.payload];
                sockets[end].send_to(datagram, addresses[1 - end]).unwrap();
            }
        }
    }
    println!("sent {:?}", hosts[0].queues(QPN).sent);
    println!("received {:?}", hosts[1].queues(QPN).received);
    assert_eq!(hosts[1].memory, b"hello");
}
