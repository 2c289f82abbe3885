//! What an observer of work requests is told.

use std::sync::{Arc, Mutex};

use roce::transport::{Operation, Status};

use crate::testing::driver::{Driver, SIGNALED, remote, segment};
use crate::work::{Posted, WorkEvent, WorkObserver};

/// Returns what the driver's device has told since the last call.
fn observe(driver: &mut Driver) -> impl FnMut() -> Vec<WorkEvent> + use<> {
    observe_by(driver, false)
}

/// As above, with the data of writes if `of_data`.
fn observe_by(driver: &mut Driver, of_data: bool) -> impl FnMut() -> Vec<WorkEvent> + use<> {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let tell = move |event: &WorkEvent| {
        told.lock().unwrap().push(event.clone());
        true
    };
    let observer = match of_data {
        true => WorkObserver::of_data(tell),
        false => WorkObserver::new(tell),
    };
    driver.hca.observe_work(Some(observer));
    move || std::mem::take(&mut *events.lock().unwrap())
}

fn posted(event: &WorkEvent) -> &Posted {
    match event {
        WorkEvent::Posted(posted) => posted,
        other => panic!("{other:?}"),
    }
}

#[test]
fn work_requests_are_posted_and_end() {
    let mut driver = Driver::new("ib");
    let (_cq, mut a, mut b) = driver.pair();
    let memory = driver.pages(2);
    let key = driver.key;
    let mut events = observe(&mut driver);
    let mut segments = remote(memory + 4096, key);
    segments.extend(segment(12, key, memory));
    driver.post(&mut a, 0x08, 0, &segments);
    let told = events();
    let write = posted(&told[0]);
    assert!(!write.is_signaled && !write.is_inline && told.len() == 2);
    let work = &write.work;
    assert_eq!((work.qpn, work.number), (a.number, Some(0)));
    assert_eq!(work.operation, Some(Operation::Write));
    assert_eq!((work.length, work.remote), (12, Some((memory + 4096, key))));
    assert_eq!(work.buffers()[0].va, memory);
    let qpn = a.number;
    let WorkEvent::Ended(ended) = &told[1] else {
        panic!("{told:?}");
    };
    assert_eq!((ended.qpn, ended.number), (qpn, Some(0)));
    assert!(ended.status == Status::Success && ended.is_send && !ended.has_completion);
    // A receive that the device takes before its doorbell is told first.
    driver.post_recv(&mut b, &segment(100, key, memory));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(12, key, memory));
    let told = events();
    assert_eq!(posted(&told[0]).work.number, Some(1));
    let receive = told
        .iter()
        .skip(1)
        .find(|it| matches!(it, WorkEvent::Posted(_)));
    let receive = posted(receive.unwrap());
    assert_eq!((receive.work.qpn, receive.work.operation), (b.number, None));
    assert_eq!(receive.work.buffers()[0].length, 100);
    let lengths: Vec<_> = (told.iter())
        .filter_map(|it| match it {
            WorkEvent::Ended(it) => Some((it.is_send, it.length)),
            _ => None,
        })
        .collect();
    assert!(
        lengths.contains(&(false, 12)) && lengths.len() == 2,
        "{told:?}"
    );
    driver.modify(0x50a, a.number, |input| input);
    assert_eq!(events(), [WorkEvent::Emptied { qpn }]);
    driver.hca.observe_work(None);
    driver.post_recv(&mut b, &segment(100, key, memory));
    assert_eq!(events(), []);
}

#[test]
fn a_queue_pair_that_is_left_is_told_again_once_it_was_reset() {
    let mut driver = Driver::new("ib");
    let (_cq, mut a, b) = driver.pair();
    let memory = driver.pages(2);
    let key = driver.key;
    let mut segments = remote(memory + 4096, key);
    segments.extend(segment(12, key, memory));
    let count = Arc::new(Mutex::new(0));
    let told = Arc::clone(&count);
    let observer = WorkObserver::new(move |_| {
        *told.lock().unwrap() += 1;
        false
    });
    driver.hca.observe_work(Some(observer));
    for _ in 0..2 {
        driver.post(&mut a, 0x08, SIGNALED, &segments);
        assert_eq!(*count.lock().unwrap(), 1);
    }
    driver.modify(0x50a, a.number, |input| input);
    assert_eq!(*count.lock().unwrap(), 2);
    (a.posted, a.received) = (0, 0);
    driver.write(a.doorbell, &[0; 8]);
    driver.connect(a.number, b.number, 1);
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(*count.lock().unwrap(), 3);
}

/// What the program has read does not count, nor what has no completion, nor what a reset has
/// taken away.
#[test]
fn completions_that_may_come_are_counted() {
    let mut driver = Driver::new("ib");
    let mut cq = driver.create_cq(2);
    let (mut a, mut b) = driver.pair_on(&cq);
    let memory = driver.pages(2);
    let key = driver.key;
    let mut events = observe(&mut driver);
    let mut segments = remote(memory + 4096, key);
    segments.extend(segment(12, key, memory));
    let mut write = |driver: &mut Driver, flags| {
        driver.post(&mut a, 0x08, flags, &segments);
        let told = events();
        let last = (told.iter().rev()).find(|it| matches!(it, WorkEvent::Posted(_)));
        let load = posted(last.unwrap()).queue;
        assert_eq!((load.entries, load.ignores_overrun), (4, false));
        load.outstanding
    };
    assert_eq!(write(&mut driver, SIGNALED), 1);
    assert_eq!(write(&mut driver, 0), 1);
    assert_eq!(write(&mut driver, SIGNALED), 2);
    driver.poll(&mut cq).unwrap();
    assert_eq!(write(&mut driver, 0), 1);
    // Two receives, which nothing consumes.
    for _ in 0..2 {
        driver.post_recv(&mut b, &segment(100, key, memory));
    }
    driver.hca.ring(b.number, roce::transport::Queue::Receive);
    assert_eq!(write(&mut driver, SIGNALED), 2 + 2);
    driver.modify(0x50a, b.number, |input| input);
    assert_eq!(write(&mut driver, 0), 2);
}

/// Data are told as they are when the doorbell rings, and that they are read after that.
#[test]
fn observers_of_data_are_told_those_of_writes() {
    let mut driver = Driver::new("ib");
    let (_cq, mut a, mut b) = driver.pair();
    let memory = driver.pages(2);
    let key = driver.key;
    driver.write(memory, b"abcdefgh");
    let mut events = observe_by(&mut driver, true);
    let mut segments = remote(memory + 4096, key);
    segments.extend(segment(3, key, memory + 4));
    segments.extend(segment(2, key, memory));
    driver.post(&mut a, 0x08, 0, &segments);
    let told = events();
    assert_eq!(posted(&told[0]).data.as_deref(), Some(&b"efgab"[..]));
    let reading = WorkEvent::Reading {
        qpn: a.number,
        number: 0,
    };
    assert_eq!(told[1], reading);
    assert!(matches!(told[2], WorkEvent::Ended(_)), "{told:?}");
    // Neither of sends, nor what cannot be read.
    driver.post_recv(&mut b, &segment(100, key, memory));
    driver.post(&mut a, 0x0a, 0, &segment(12, key, memory));
    let mut segments = remote(memory + 4096, key);
    segments.extend(segment(3, key + 1, memory));
    driver.post(&mut a, 0x08, 0, &segments);
    let told = events();
    let data = told.iter().filter_map(|it| match it {
        WorkEvent::Posted(posted) => Some(posted.data.is_some()),
        _ => None,
    });
    assert_eq!(Vec::from_iter(data), [false; 3]);
}
