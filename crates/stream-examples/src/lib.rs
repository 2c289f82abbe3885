//! Programs made for TCP over RDMA streams, unchanged: a hyper HTTP/1 server
//! and a tonic gRPC server. What each takes to have a stream of ours instead of
//! a `TcpStream` is in [`http`] and [`grpc`]; `examples/` has the servers, and
//! `tests/` drives both over a device.

pub mod grpc;
pub mod http;
