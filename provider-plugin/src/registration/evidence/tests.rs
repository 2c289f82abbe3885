use super::*;

/// What a genuine library of a release shows.
fn genuine(release: u32, named: bool) -> Evidence {
    let layout = Layout::of_release(release).unwrap();
    let minor = MINORS.iter().rev().find(|m| m.1 <= release).unwrap().0;
    Evidence {
        pabis: vec![layout.pabi],
        markers: MARKERS.iter().map(|m| m.since <= release).collect(),
        file: if named {
            FileVersion::Known(minor, release)
        } else {
            FileVersion::Absent
        },
        own_suffix: Some(layout.pabi),
    }
}

#[test]
fn every_release_is_recognised_by_its_file_name() {
    for release in 34..=65 {
        assert_eq!(
            decide(&genuine(release, true)),
            Ok(Layout::of_release(release).unwrap())
        );
    }
}

#[test]
fn without_a_file_name_ambiguous_releases_are_refused() {
    for release in 34..=65 {
        let decided = decide(&genuine(release, false));
        match release {
            // 36 can only be 36; 37 to 48 look alike but have three layouts;
            // 65 may be a later release with the same private ABI.
            37..=48 | 65 => assert!(decided.is_err(), "{release}: {decided:?}"),
            _ => assert_eq!(
                decided,
                Ok(Layout::of_release(release).unwrap()),
                "{release}"
            ),
        }
    }
}

#[test]
fn contradictions_are_refused() {
    // The file name says another release than the symbols.
    for release in 34..=65 {
        for claimed in 30..=70 {
            let mut seen = genuine(release, true);
            let FileVersion::Known(minor, _) = seen.file else {
                unreachable!()
            };
            seen.file = FileVersion::Known(minor, claimed);
            if let Ok(layout) = decide(&seen) {
                // Where symbols do not tell, the name is all there is; it must
                // at least be possible.
                assert!((layout.first..=layout.last).contains(&claimed));
                assert_eq!(
                    genuine(claimed, true).markers,
                    seen.markers,
                    "{release} claimed to be {claimed}"
                );
            }
        }
    }
    // One function too many or too few.
    for release in [34, 36, 44, 50, 58, 61, 63, 64, 65] {
        for (i, marker) in MARKERS.iter().enumerate() {
            let mut seen = genuine(release, true);
            seen.markers[i] = !seen.markers[i];
            assert!(decide(&seen).is_err(), "{release}, {}", marker.name);
        }
    }
    // Loaded under the name of another private ABI.
    let mut seen = genuine(60, true);
    seen.own_suffix = Some(34);
    assert!(
        decide(&seen)
            .unwrap_err()
            .contains("asked for a provider of private ABI 34")
    );
    // A minor number of the library that does not go with the release.
    let mut seen = genuine(44, true);
    seen.file = FileVersion::Known(15, 44);
    assert!(decide(&seen).is_err());
}

#[test]
fn unknown_releases_are_refused() {
    let mut seen = genuine(65, true);
    seen.pabis = vec![66];
    seen.own_suffix = Some(66);
    assert!(decide(&seen).unwrap_err().contains("66"));
    let mut seen = genuine(65, true);
    seen.file = FileVersion::Known(18, 66);
    assert!(
        decide(&seen).is_err(),
        "a later release with the same private ABI"
    );
    let mut seen = genuine(34, true);
    seen.pabis = vec![33];
    assert!(decide(&seen).is_err());
    let mut seen = genuine(34, true);
    seen.pabis = vec![34, 57];
    assert!(decide(&seen).is_err());
    let mut seen = genuine(50, true);
    seen.file = FileVersion::Strange("14.2410mlnx54".to_owned());
    assert!(decide(&seen).is_err());
}

#[test]
fn file_names() {
    assert_eq!(
        file_version("/usr/lib/libibverbs.so.1.14.44.0"),
        FileVersion::Known(14, 44)
    );
    assert_eq!(
        file_version("libibverbs.so.1.18.65.0"),
        FileVersion::Known(18, 65)
    );
    assert_eq!(file_version("/x/libibverbs.so.1"), FileVersion::Absent);
    assert_eq!(file_version("/x/libibverbs.so.1.14"), FileVersion::Absent);
    assert_eq!(file_version("/x/libverbs-private.so"), FileVersion::Absent);
    assert!(matches!(
        file_version("libibverbs.so.1.14.x"),
        FileVersion::Strange(_)
    ));
    assert!(matches!(
        file_version("libibverbs.so.1.x.44"),
        FileVersion::Strange(_)
    ));
    assert!(matches!(
        file_version("libibverbs.so.1.14.99999999999"),
        FileVersion::Strange(_)
    ));
}

#[test]
fn own_names() {
    assert_eq!(
        own_suffix("/usr/lib/libibverbs/libringverbs-rdmav34.so"),
        Some(34)
    );
    assert_eq!(own_suffix("libringverbs-rdmav.so"), None);
    assert_eq!(own_suffix("libringverbs_provider.so"), None);
}
