//! The transport of InfiniBand, RoCE v1 and RoCE v2 as a state machine.
//!
//! Nothing here does input or output, reads a clock, starts a thread or waits. The same
//! sequence of calls gives the same packets and completions.
//!
//! # Driving a transport
//!
//! A [`Transport`](transport::Transport) has the queue pairs of one HCA. Work requests,
//! completions and memory are the caller's: they are reached through
//! [`Host`](transport::Host), which is passed to each call that needs it.
//!
//! | kind | methods of `Transport` |
//! |---|---|
//! | input | [`receive`]: a frame that has arrived; [`ring`]: work requests were posted |
//! | time | each call that takes `now`: nanoseconds from any origin, never less than before |
//! | commands | [`create`], [`modify`], [`destroy`], [`attach`], [`detach`], [`alias`], [`restore_stream`], [`confirm_sent`]; settings: [`set_lossy`], [`set_patient`], [`set_loopback`], [`set_confirmed`], [`record_senders`] |
//! | progress | [`run`]: expired timers, responses, requests, flushes |
//! | output | [`pop`]: frames to send; [`deadline`]: when `run` is due again |
//! | questions | [`query`], [`config`], [`counters`] |
//!
//! A loop makes these calls in this order, and may make any others between them:
//!
//! 1. [`receive`] for each frame that has arrived,
//! 2. [`run`] with a budget of packets; it returns true if it is to be called again at once,
//! 3. [`pop`] until it returns `None`; frames wait in a queue that is not bounded, so the
//!    budget is what bounds them,
//! 4. if there was nothing to do, sleep until [`deadline`], a frame, or a doorbell.
//!
//! Completions ([`Host::send_done`], [`Host::recv_done`]) and events ([`Host::event`]) are
//! reported by `receive`, `run` and `modify`, while they run; a message has been written to
//! memory before.
//!
//! Frames come from peers and are not trusted: malformed ones are dropped and counted, and
//! none makes a call panic, or access memory that `Host` has not permitted. `Host` is
//! trusted.
//!
//! [`Fabric`](fabric::Fabric) connects transports in memory; examples: `simulated`, `udp`.
//!
//! [`receive`]: transport::Transport::receive
//! [`ring`]: transport::Transport::ring
//! [`create`]: transport::Transport::create
//! [`modify`]: transport::Transport::modify
//! [`destroy`]: transport::Transport::destroy
//! [`attach`]: transport::Transport::attach
//! [`detach`]: transport::Transport::detach
//! [`alias`]: transport::Transport::alias
//! [`restore_stream`]: transport::Transport::restore_stream
//! [`confirm_sent`]: transport::Transport::confirm_sent
//! [`set_confirmed`]: transport::Transport::set_confirmed
//! [`set_lossy`]: transport::Transport::set_lossy
//! [`set_patient`]: transport::Transport::set_patient
//! [`set_loopback`]: transport::Transport::set_loopback
//! [`record_senders`]: transport::Transport::record_senders
//! [`run`]: transport::Transport::run
//! [`pop`]: transport::Transport::pop
//! [`deadline`]: transport::Transport::deadline
//! [`query`]: transport::Transport::query
//! [`config`]: transport::Transport::config
//! [`counters`]: transport::Transport::counters
//! [`Host::send_done`]: transport::Host::send_done
//! [`Host::recv_done`]: transport::Host::recv_done
//! [`Host::event`]: transport::Host::event

#![forbid(unsafe_code)]

pub mod bits;
pub mod fabric;
pub mod packet;
pub mod pcap;
pub mod rule;
pub mod transport;
