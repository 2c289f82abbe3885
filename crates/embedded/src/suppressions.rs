//! Suppressions of `check`: reports that are known, and neither printed nor counted.
//!
//! A file has one on each line: a rule, or `*` for all, and text that the report must contain,
//! such as a function or a file. Empty lines and those that begin with `#` are ignored.

/// Reports of `check` that are known: those of a rule, or of all with `*`, with a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Suppressions(Vec<(String, String)>);

impl Suppressions {
    /// Parses a file: a rule and a text that the report contains on each line.
    ///
    /// # Errors
    /// The number of a line whose rule is none.
    pub fn parse(text: &str, is_rule: impl Fn(&str) -> bool) -> Result<Self, usize> {
        let mut list = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (rule, text) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            if rule != "*" && !is_rule(rule) {
                return Err(number + 1);
            }
            list.push((rule.to_owned(), text.trim().to_owned()));
        }
        Ok(Self(list))
    }

    /// Returns whether a report is suppressed.
    pub fn contain(&self, rule: &str, report: &str) -> bool {
        let mut list = self.0.iter();
        list.any(|(of, text)| (of == "*" || of == rule) && report.contains(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_rules_and_parts_of_reports() {
        let parse = |text| Suppressions::parse(text, |it| ["leak", "other"].contains(&it));
        let list = parse("# known\n\nleak  main (a.c\n* libknown\n").unwrap();
        assert!(list.contain("leak", "at main (a.c:5)"));
        assert!(!list.contain("leak", "at main (b.c:5)"));
        assert!(!list.contain("other", "at main (a.c:5)"));
        assert!(list.contain("other", "at libknown.so+0x5"));
        assert_eq!(parse("leak\nlaek x"), Err(2));
    }
}
