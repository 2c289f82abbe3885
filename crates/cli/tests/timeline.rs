//! A page of real packets, in a browser. Without Chromium the test is skipped.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use embedded::{CaptureOptions, Drive, Network};
use ringverbs::{Device, Transport};
use serde_json::{Value, json};
use testing::pcapng::{frames, frames_before_kill};

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = format!("ringverbs-timeline-page-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the capture's file.
fn captured(folder: &Folder) -> Option<PathBuf> {
    let mut paths = fs::read_dir(&folder.0)
        .unwrap()
        .map(|it| it.unwrap().path());
    paths.find(|path| path.extension().is_some_and(|it| it == "pcapng"))
}

/// Captures a message of several packets that is sent before the receive is posted.
fn capture(folder: &Folder) -> PathBuf {
    let network = Network::new(Drive::Thread).unwrap();
    let options = CaptureOptions::new(folder.0.join("frames.pcapng"));
    network.capture(&options, None).unwrap();
    let open = || {
        Device::from(network.device("roce").unwrap())
            .open()
            .unwrap()
    };
    let (from, to) = (open(), open());
    let (near, far) = (from.alloc_pd().unwrap(), to.alloc_pd().unwrap());
    let mut sent = from.completion_queue().entries(16).build().unwrap();
    let mut arrived = to.completion_queue().entries(16).build().unwrap();
    let sender = near.queue_pair(Transport::Reliable, &sent).build();
    let receiver = far.queue_pair(Transport::Reliable, &arrived).build();
    let (mut sender, mut receiver) = (sender.unwrap(), receiver.unwrap());
    let (here, there) = (from.local_address(1).unwrap(), to.local_address(1).unwrap());
    let (a, b) = (sender.endpoint(&here), receiver.endpoint(&there));
    sender.connect(&here, &b).unwrap();
    receiver.connect(&there, &a).unwrap();
    let outgoing = near.alloc(5000).unwrap().into_buffer();
    sender.send(outgoing, 2).unwrap();
    // Five packets, and the answer that the receiver is not ready.
    let deadline = Instant::now() + Duration::from_secs(60);
    while captured(folder).is_none_or(|path| frames_before_kill(&path).len() < 8) {
        assert!(Instant::now() < deadline);
        sleep(Duration::from_millis(1));
    }
    let incoming = far.alloc(8192).unwrap().into_buffer();
    receiver.receive(incoming, 1).unwrap();
    sent.poll_until_one().unwrap().result.unwrap();
    arrived.poll_until_one().unwrap().result.unwrap();
    network.end_capture().unwrap()
}

/// A browser without a window, by the DevTools protocol: messages end with a zero byte.
struct Browser {
    child: Child,
    requests: File,
    answers: BufReader<File>,
    session: Option<String>,
    last: u64,
    /// What the page has reported on the console, and exceptions.
    errors: Vec<Value>,
    is_loaded: bool,
}

impl Browser {
    /// Starts Chromium; `None` if there is none.
    fn start(folder: &Folder) -> Option<Self> {
        let name = ["chromium", "chromium-browser", "google-chrome"]
            .into_iter()
            .find(|name| {
                let found = Command::new("sh")
                    .args(["-c", "command -v \"$0\"", name])
                    .output();
                found.is_ok_and(|it| it.status.success())
            })?;
        let pipes = ["requests", "answers"].map(|name| folder.0.join(name));
        for pipe in &pipes {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        let profile = folder.0.join("profile");
        let script = "exec \"$0\" --headless --no-sandbox --disable-gpu --remote-debugging-pipe \
            --window-size=1300,900 --user-data-dir=\"$3\" about:blank 3<\"$1\" 4>\"$2\"";
        let mut command = Command::new("sh");
        command.args(["-c", script, name]).args(&pipes).arg(profile);
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // In the order in which the shell opens them.
        let requests = OpenOptions::new().write(true).open(&pipes[0]).unwrap();
        let answers = BufReader::new(File::open(&pipes[1]).unwrap());
        let mut browser = Self {
            child,
            requests,
            answers,
            session: None,
            last: 0,
            errors: Vec::new(),
            is_loaded: false,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        Some(browser)
    }

    /// Reads a message, and notes events.
    fn read(&mut self) -> Value {
        let mut message = Vec::new();
        self.answers.read_until(0, &mut message).unwrap();
        assert_eq!(message.pop(), Some(0), "the browser has ended");
        let message: Value = serde_json::from_slice(&message).unwrap();
        match message["method"].as_str() {
            Some("Page.loadEventFired") => self.is_loaded = true,
            Some("Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded") => {
                self.errors.push(message.clone());
            }
            _ => {}
        }
        message
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let mut request = json!({ "id": self.last, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        write!(self.requests, "{request}\0").unwrap();
        loop {
            let message = self.read();
            if message["id"] == self.last {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }

    fn open(&mut self, page: &Path) {
        self.call(
            "Page.navigate",
            json!({ "url": format!("file://{}", page.display()) }),
        );
        while !self.is_loaded {
            self.read();
        }
    }

    /// Evaluates an expression after the page has drawn.
    fn value(&mut self, expression: &str) -> Value {
        let drawn =
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))";
        let expression = format!("{drawn}.then(() => ({expression}))");
        let parameters =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {answer}"
        );
        answer["result"]["value"].clone()
    }

    fn mouse(&mut self, kind: &str, x: f64, y: f64, more: Value) {
        let mut event = json!({ "type": kind, "x": x, "y": y });
        for (name, value) in more.as_object().unwrap() {
            event[name] = value.clone();
        }
        self.call("Input.dispatchMouseEvent", event);
    }

    fn arrows(&mut self) -> u64 {
        self.value("document.querySelectorAll('.arrow').length")
            .as_u64()
            .unwrap()
    }

    /// Returns the part of the diagram that is in sight: left, top, width, height.
    fn view_box(&mut self) -> Vec<f64> {
        let text = self.value("document.querySelector('#diagram').getAttribute('viewBox')");
        let numbers = text.as_str().unwrap().split(' ');
        numbers.map(|it| it.parse().unwrap()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its processes write to the profile until they have ended.
        let _ = write!(self.requests, "{{\"id\":0,\"method\":\"Browser.close\"}}\0");
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn page_of_packets_in_a_browser() {
    let folder = Folder::new();
    let capture = capture(&folder);
    const HOSTILE: &str = "<img src=x onerror=alert(1)>";
    let explanation = json!({ "version": 1, "type": "report", "class": "command", "device": HOSTILE,
        "message": HOSTILE, "process": 1, "queue_pair": null });
    let explanations = folder.0.join("why.json");
    fs::write(&explanations, format!("{explanation}\n")).unwrap();
    let page = folder.0.join("page.html");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringverbs"));
    command
        .arg("timeline")
        .args([&page, &capture, &explanations]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let sent = frames(&capture).iter().filter(|it| it.is_outbound).count() as u64;
    // Five packets, which the receiver refuses at least once, and the answers.
    assert!(sent >= 8, "{sent}");

    let Some(mut browser) = Browser::start(&folder) else {
        testing::skip!("there is no Chromium");
        return;
    };
    browser.open(&page);
    browser.value("document.querySelector('#fit').click()");
    assert_eq!(browser.arrows(), sent);
    let whole = browser.view_box();
    let text = browser.value("document.body.textContent");
    assert!(text.as_str().unwrap().contains("RNR NAK"), "{text}");
    assert!(text.as_str().unwrap().contains(HOSTILE), "{text}");
    assert_eq!(browser.value("document.querySelectorAll('img').length"), 0);

    // Zoom at a point, and move.
    browser.mouse(
        "mouseWheel",
        500.0,
        400.0,
        json!({ "deltaX": 0, "deltaY": -400, "modifiers": 2 }),
    );
    let near = browser.view_box();
    assert!(
        near[2] < whole[2] * 0.6 && near[3] < whole[3] * 0.6,
        "{whole:?} {near:?}"
    );
    browser.mouse(
        "mousePressed",
        600.0,
        600.0,
        json!({ "button": "left", "clickCount": 1 }),
    );
    browser.mouse(
        "mouseMoved",
        600.0,
        500.0,
        json!({ "button": "left", "buttons": 1 }),
    );
    browser.mouse(
        "mouseReleased",
        600.0,
        500.0,
        json!({ "button": "left", "clickCount": 1 }),
    );
    let moved = browser.view_box();
    assert!(
        moved[1] > near[1] && moved[2] == near[2],
        "{near:?} {moved:?}"
    );

    // The fields of an arrow.
    browser.value("document.querySelector('#fit').click()");
    let at = browser.value(
        "(() => { const box = document.querySelector('.arrow.data .line').getBoundingClientRect(); \
            return [box.x + box.width / 2, box.y + box.height / 2]; })()",
    );
    let (x, y) = (at[0].as_f64().unwrap(), at[1].as_f64().unwrap());
    browser.mouse("mouseMoved", x, y, json!({}));
    let details = browser.value("document.querySelector('#details').innerText");
    assert!(details.as_str().unwrap().contains("PSN"), "{details}");

    // The choice of kinds and queue pairs.
    browser.value("document.querySelector('#kind-acknowledgements').click()");
    assert!(browser.arrows() < sent);
    // A click makes the buttons anew.
    for _ in 0..2 {
        browser.value("document.querySelector('#lanes button[aria-pressed=true]').click()");
    }
    assert_eq!(browser.arrows(), 0);
    browser.value("document.querySelector('#lanes button').click()");
    assert!(browser.arrows() > 0);
    assert_eq!(browser.errors, [] as [Value; 0]);
}
