//! Lines of a record as a list of calls, as strace(1) prints them.

use std::fmt::{Display, Write as _};

use nix::errno::Errno;
use replay::{Arguments, Call, Completion, DeviceCompletion, DevicePost, Event, Post, Remote, Sge};
use serde_json::Value;

use crate::escape::escaped;
use crate::out::{self, paint};

/// Calls that are no functions of libibverbs.
const COMMANDS: [&str; 4] = [
    "ioctl",
    "driver_ioctl",
    "write_command",
    "create_async_events",
];
/// How the names of functions begin that create objects.
const CREATORS: [&str; 4] = ["create_", "alloc_", "reg_", "open_"];
/// Values that are clearer in hexadecimal: addresses, keys and numbers of queue pairs.
const HEXADECIMAL: [&str; 10] = [
    "address",
    "iova",
    "lkey",
    "rkey",
    "qkey",
    "dest_qp_num",
    "qp_num",
    "rq_psn",
    "sq_psn",
    "flow_label",
];

/// Which lines are listed: all, or those of types, objects and calls.
#[derive(Clone, Debug, Default)]
pub struct Selection(pub Vec<String>);

impl Selection {
    /// Returns whether a line is listed.
    pub fn contains(&self, event: &Event) -> bool {
        let has = |name: &str| self.0.iter().any(|it| it == name);
        self.0.is_empty()
            || match event {
                Event::Call(call) => {
                    let object = call.object.as_deref().unwrap_or_default();
                    let kind = object.split(' ').next().unwrap_or_default();
                    has("call") || has(&call.call) || !kind.is_empty() && has(kind)
                }
                Event::Post(post) => has("post") || has(if post.send { "send" } else { "recv" }),
                Event::DevicePost(post) => {
                    has("post") || has(if post.send { "send" } else { "recv" })
                }
                Event::Completion(_) | Event::DeviceCompletion(_) => {
                    has("completion") || has("poll")
                }
                Event::Record { .. } | Event::Missed { .. } => true,
                _ => false,
            }
    }
}

/// Returns a line of the list; times are relative to `start`.
pub fn line(event: &Event, start: u64) -> Option<String> {
    let text = match event {
        Event::Record {
            process, program, ..
        } => format!("process {process}: {program}"),
        Event::Call(call) => return Some(timed(call.time, call.thread, start, &of_call(call))),
        Event::Post(post) => return Some(timed(post.time, post.thread, start, &of_post(post))),
        Event::Completion(it) => {
            return Some(timed(it.time, it.thread, start, &of_completion(it)));
        }
        Event::DevicePost(it) => return Some(timed(it.time, "-", start, &of_device_post(it))),
        Event::DeviceCompletion(it) => {
            return Some(timed(it.time, "-", start, &of_device_completion(it)));
        }
        Event::Missed { count } => format!("{count} posts and completions in signal handlers"),
        _ => return None,
    };
    Some(paint(out::DIM, text))
}

fn timed(time: u64, thread: impl Display, start: u64, text: &str) -> String {
    let micros = time.saturating_sub(start) / 1000;
    let (seconds, rest) = (micros / 1_000_000, micros % 1_000_000);
    let when = paint(out::DIM, format_args!("{seconds:4}.{rest:06} {thread:>7}"));
    format!("{when} {text}")
}

/// Returns what a function has returned.
fn result(errno: i32) -> String {
    match errno {
        0 => " = 0".to_owned(),
        errno => {
            let error = Errno::from_raw(errno);
            let text = error.desc();
            format!(
                " = {}",
                paint(out::BAD, format_args!("-1 {error:?} ({text})"))
            )
        }
    }
}

fn of_call(call: &Call) -> String {
    let name = escaped(&call.call);
    let prefix = if COMMANDS.contains(&&*call.call) {
        ""
    } else {
        "ibv_"
    };
    let creates = CREATORS.iter().any(|it| call.call.starts_with(it));
    let object = call.object.as_deref();
    let about = match object.filter(|_| !creates) {
        Some(object) => object,
        None => &call.device,
    };
    let mut text = format!("{}(", paint(out::NAME, format_args!("{prefix}{name}")));
    let _ = write!(text, "{}", escaped(about));
    text.push_str(&arguments(&call.arguments));
    text.push(')');
    match object.filter(|_| creates && call.errno == 0) {
        Some(object) => _ = write!(text, " = {}", escaped(object)),
        None => text.push_str(&result(call.errno)),
    }
    let seconds = call.took as f64 / 1e9;
    text + &paint(out::DIM, format_args!(" <{seconds:.6}>"))
}

/// Returns the arguments, each after a comma.
fn arguments(given: &Arguments) -> String {
    given.iter().fold(String::new(), |mut text, (name, it)| {
        let value = value(name, it);
        // The type of an object says what it is.
        let _ = match value.split(' ').next() == Some(name) {
            true => write!(text, ", {}", escaped(value)),
            false => write!(text, ", {}={}", escaped(name), escaped(value)),
        };
        text
    })
}

fn value(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_u64() {
            Some(number) if HEXADECIMAL.contains(&name) => format!("{number:#x}"),
            _ => number.to_string(),
        },
        Value::Array(list) if list.is_empty() => "0".to_owned(),
        Value::Array(list) => {
            let list: Vec<String> = list.iter().map(|it| self::value("", it)).collect();
            list.join("|")
        }
        Value::Object(members) => {
            let members = members.iter();
            let list: Vec<String> = members
                .map(|(name, it)| format!("{name}={}", self::value(name, it)))
                .collect();
            format!("{{{}}}", list.join(", "))
        }
        other => other.to_string(),
    }
}

fn of_post(post: &Post) -> String {
    let (name, queue) = match (post.send, post.srq) {
        (_, Some(queue)) => ("ibv_post_srq_recv", format!("srq {queue}")),
        (true, None) => ("ibv_post_send", format!("qp {:#x}", post.qp.unwrap_or(0))),
        (false, None) => ("ibv_post_recv", format!("qp {:#x}", post.qp.unwrap_or(0))),
    };
    let mut text = format!(
        "{}({queue}, wr_id={:#x}",
        paint(out::NAME, name),
        post.wr_id
    );
    if let Some(opcode) = &post.opcode {
        let _ = write!(text, ", {}", escaped(opcode));
    }
    add_memory(&mut text, post.bytes, &post.sges, post.remote);
    if let Some(to) = post.datagram {
        let _ = write!(text, ", to qp {:#x} qkey={:#x}", to.qp, to.qkey);
    }
    if let Some(key) = post.key {
        let _ = write!(text, ", key={key:#x}");
    }
    for (is_set, flag) in [(post.signaled, "signaled"), (post.inline, "inline")] {
        if is_set {
            let _ = write!(text, ", {flag}");
        }
    }
    text + ")" + &result(post.errno)
}

/// Adds the memory of a work request.
fn add_memory(text: &mut String, bytes: u64, sges: &[Sge], remote: Option<Remote>) {
    let _ = write!(text, ", {} bytes", bytes);
    for (number, sge) in sges.iter().enumerate() {
        let _ = match (number, sges.len()) {
            (0, 1) => write!(text, " at {:#x} lkey={:#x}", sge.address, sge.lkey),
            _ => write!(
                text,
                "{} {} at {:#x} lkey={:#x}",
                if number == 0 { ":" } else { "," },
                sge.length,
                sge.address,
                sge.lkey
            ),
        };
    }
    if let Some(remote) = remote {
        let _ = write!(
            text,
            ", remote {:#x} rkey={:#x}",
            remote.address, remote.rkey
        );
    }
}

/// Returns what a work request is called that only the device has seen.
fn name_of(qp: u32, send: bool, number: Option<u32>) -> String {
    let name = if send { "send" } else { "receive" };
    let number = number.map_or_else(String::new, |number| format!(" {number}"));
    format!("qp {qp:#x}, {name}{number}")
}

fn of_device_post(post: &DevicePost) -> String {
    let mut text = format!(
        "{}({}",
        paint(out::NAME, format_args!("{}: posted", post.device)),
        name_of(post.qp, post.send, post.number)
    );
    if let Some(opcode) = &post.opcode {
        let _ = write!(text, ", {}", escaped(opcode));
    }
    add_memory(&mut text, post.bytes, &post.sges, post.remote);
    for (is_set, flag) in [(post.signaled, "signaled"), (post.inline, "inline")] {
        if is_set {
            let _ = write!(text, ", {flag}");
        }
    }
    text + ")"
}

fn of_device_completion(it: &DeviceCompletion) -> String {
    let mut text = format!(
        "{}({}) = ",
        paint(out::NAME, format_args!("{}: completed", it.device)),
        name_of(it.qp, it.send, it.number)
    );
    if let Some(bytes) = it.bytes {
        let _ = write!(text, "{bytes} bytes, ");
    }
    text + &status(&it.status)
}

fn status(status: &str) -> String {
    let style = match status {
        "success" => out::GOOD,
        _ => out::BAD,
    };
    paint(style, status)
}

fn of_completion(it: &Completion) -> String {
    let mut text = format!("{}(cq {}) = ", paint(out::NAME, "ibv_poll_cq"), it.cq);
    if let Some(number) = it.qp {
        let _ = write!(text, "qp {number:#x}, ");
    }
    let _ = write!(text, "wr_id={:#x}, ", it.wr_id);
    if let Some(opcode) = &it.opcode {
        let _ = write!(text, "{}, ", escaped(opcode));
    }
    if let Some(bytes) = it.bytes {
        let _ = write!(text, "{bytes} bytes, ");
    }
    text + &status(&it.status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(line: &str) -> String {
        let event = Event::parse(line).unwrap();
        let line = super::line(&event, 1_000_000_000).unwrap();
        String::from_utf8(anstream::adapter::strip_bytes(line.as_bytes()).into_vec()).unwrap()
    }

    #[test]
    fn calls_are_listed_as_functions() {
        let created = r#"{"type":"call","time":1000042000,"took":42000,"thread":7,
            "call":"create_qp","device":"mlx5_0","object":"qp 0x40","errno":0,
            "arguments":{"qp_type":"RC","pd":"pd 1","send_cq":"cq 3","access":[]}}"#;
        assert_eq!(
            listed(created),
            "   0.000042       7 ibv_create_qp(mlx5_0, qp_type=RC, pd 1, send_cq=cq 3, access=0) \
             = qp 0x40 <0.000042>"
        );
        let refused = r#"{"type":"call","time":2000000000,"took":0,"call":"modify_qp",
            "device":"mlx5_0","object":"qp 0x40","errno":22,
            "arguments":{"qp_state":"RTR","ah_attr":{"dlid":1},"dest_qp_num":65,
            "qp_access_flags":["A","B"]}}"#;
        assert_eq!(
            listed(refused),
            "   1.000000       0 ibv_modify_qp(qp 0x40, qp_state=RTR, ah_attr={dlid=1}, \
             dest_qp_num=0x41, qp_access_flags=A|B) = -1 EINVAL (Invalid argument) <0.000000>"
        );
    }

    #[test]
    fn posts_and_completions_are_listed() {
        let post = r#"{"type":"post","time":1000000000,"qp":64,"send":true,"wr_id":5,
            "opcode":"RDMA_WRITE","bytes":64,"signaled":true,"errno":0,
            "sges":[{"address":4096,"length":64,"lkey":1}],"remote":{"address":8192,"rkey":2}}"#;
        let said = listed(post);
        let expected = "ibv_post_send(qp 0x40, wr_id=0x5, RDMA_WRITE, 64 bytes at 0x1000 \
                        lkey=0x1, remote 0x2000 rkey=0x2, signaled) = 0";
        assert!(said.ends_with(expected), "{said}");
        let seen = r#"{"type":"device_post","time":1000000000,"device":"mlx5_0","qp":64,
            "send":true,"number":5,"opcode":"SEND","bytes":8,"signaled":true,
            "sges":[{"address":4096,"length":8,"lkey":7}]}"#;
        assert_eq!(
            listed(seen),
            "   0.000000       - mlx5_0: posted(qp 0x40, send 5, SEND, 8 bytes at 0x1000 lkey=0x7, \
             signaled)"
        );
        let ended = r#"{"type":"device_completion","time":1000000000,"device":"mlx5_0","qp":64,
            "send":false,"status":"success","bytes":8}"#;
        assert_eq!(
            listed(ended),
            "   0.000000       - mlx5_0: completed(qp 0x40, receive) = 8 bytes, success"
        );
        let completion = r#"{"type":"completion","time":1000000000,"cq":2,"qp":64,"wr_id":5,
            "status":"remote access error"}"#;
        let said = listed(completion);
        let expected = "ibv_poll_cq(cq 2) = qp 0x40, wr_id=0x5, remote access error";
        assert!(said.ends_with(expected), "{said}");
    }

    #[test]
    fn hostile_names_are_escaped() {
        let hostile = r#"{"type":"call","time":0,"took":0,"call":"a\u001b[2J","device":"b\n",
            "errno":0,"arguments":{"c\u202e":"d\u001b"}}"#;
        let said = listed(hostile);
        assert!(
            said.contains(r"ibv_a\u{1b}[2J(b\u{a}, c\u{202e}=d\u{1b})"),
            "{said}"
        );
    }

    #[test]
    fn lines_are_selected_by_type_object_and_call() {
        let event = |line: &str| Event::parse(line).unwrap();
        let call = event(
            r#"{"type":"call","time":0,"took":0,"call":"create_qp","object":"qp 0x1","errno":0}"#,
        );
        let post =
            event(r#"{"type":"post","time":0,"qp":1,"send":false,"wr_id":0,"bytes":0,"errno":0}"#);
        let selects = |list: &[&str], event: &Event| {
            Selection(list.iter().map(|it| (*it).to_owned()).collect()).contains(event)
        };
        assert!(selects(&[], &call) && selects(&[], &post));
        assert!(selects(&["qp", "post"], &call) && selects(&["qp", "post"], &post));
        assert!(selects(&["create_qp"], &call) && !selects(&["create_qp"], &post));
        assert!(selects(&["recv"], &post) && !selects(&["send", "cq"], &post));
    }
}
