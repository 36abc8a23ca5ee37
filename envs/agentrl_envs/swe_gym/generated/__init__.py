"""Generated repositories: names, function templates, tasks, the family and its scripted expert."""
