"""Reports: the results of all laws as JSON, Markdown, JUnit XML and a page."""
